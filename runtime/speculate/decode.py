"""Speculative decoding: generates an answer's tokens in rounds of drafting and verifying."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from edge.errors import EdgeError
from edge.runtime.context import Logits
from edge.runtime.generate import Answer, Stepper
from edge.runtime.speculate.accept import EXACT, Row, Rule
from edge.runtime.speculate.draft import NOTHING, Draft, Drafter
from edge.runtime.speculate.policy import NO_OUTLOOK, Outlook, Policy, Round
from edge.runtime.speculate.shape import GRAMMAR, NO_DRAFT, DraftSource, Shape


@dataclass
class Share:
    """Figures of one draft source; see `Speculation`."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    shapes: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass
class Speculation:
    """Figures of speculative decoding in one answer.

    Attributes:
        drafter: name of the drafter.
        rounds: number of verifying runs.
        drafted, accepted: number of tokens over all rounds.
        steps: number of tokens from plain steps.
        draft_s, verify_s: seconds in the drafter, and in the target's verifying runs.
        shapes: branches of the requested draft → number of rounds.
        sources: the same figures by draft source.
        problem: why the drafter or its model was disabled; "" while it works.
        accept: name of the acceptance rule: `exact`, or a lossy one such as `top-3`.
    """

    drafter: str
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    shapes: dict[tuple[int, ...], int] = field(default_factory=dict)
    sources: dict[DraftSource, Share] = field(default_factory=lambda: defaultdict(Share))
    problem: str = ""
    accept: str = "exact"

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verifying run, the target's own token included; None without runs."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None


class Speculative:
    """Rounds of drafting and verifying, or plain steps if there is no draft.

    In each round the target consumes the pending token and the draft in one run and keeps the
    accepted path. After a chain it rewinds the rejected tokens (The Mamba in the Llama, algorithm
    2), by choosing a slot or by replay, depending on the engine; after a tree it selects the node
    at the path's end.

    With a grammar, tokens that it forces are drafted first, without calling the drafter, and
    verified like any others; hardly any is rejected. A drafter's chain is cut where it leaves the
    grammar.
    """

    def __init__(
        self,
        steps: Stepper,
        drafter: Drafter,
        policy: Policy,
        rule: Rule = EXACT,
        *,
        remaining: Callable[[], int] = lambda: 1 << 20,
    ) -> None:
        """`remaining` returns the number of tokens that the answer may still take."""
        self.figures = Speculation(drafter.name, accept=rule.name)
        self._steps = steps
        self._drafter = drafter
        self._policy = policy
        self._rule = rule
        self._remaining = remaining
        self._remembered = steps.sampler.params.remembered

    def tokens(self, logits: Logits) -> Generator[int, None, None]:
        """See `Stepper.tokens`. Closing the generator makes the last yielded token pending."""
        steps, context = self._steps, self._steps.context
        self._drafter.begin()
        self._policy.begin(steps.sampler.params.temperature == 0)
        token = steps.choose(logits)
        while True:
            context.pending = token
            steps.say(token)
            yield token
            started = time.perf_counter()
            draft = self.forced()
            if draft.tokens:
                shape = Shape.of_chain(len(draft.tokens), GRAMMAR)
                path, next_token, _ = self._round(token, draft, shape, NO_OUTLOOK, started)
            else:
                outlook = self._drafter.outlook(context.tokens, token)
                if self._policy.rests(outlook):
                    token = steps.step(token)
                    self.figures.steps += 1
                    self._policy.rested(time.perf_counter() - started)
                    continue
                chosen, shape = self._choose_shape(outlook)
                was_working = not self.figures.problem
                draft = self._draft(token, shape)
                path, next_token, outcome = self._round(token, draft, shape, outlook, started)
                # a draft cut short by the answer's end, or a failure, says nothing about the shape
                if shape == chosen and not (was_working and self.figures.problem):
                    self._policy.learn(outcome)
            for index, node in enumerate(path):
                token = draft.tokens[node]
                steps.say(token)
                try:
                    yield token
                except GeneratorExit:
                    # the token counts as sampled, not consumed: rewind it and those after it
                    context.rewind(len(path) - index)
                    context.pending = token
                    raise
            token = next_token

    def _round(
        self, pending: int, draft: Draft, shape: Shape, outlook: Outlook, started: float
    ) -> tuple[list[int], int, Round]:
        """Verify a draft and update the figures. Return (accepted nodes, next token, round)."""
        drafted = time.perf_counter()
        path, next_token = self._verify(pending, draft)
        outcome = Round(
            shape,
            len(draft.tokens),
            *draft.outcome(path),
            drafted - started,
            time.perf_counter() - drafted,
            outlook,
            (*(draft.tokens[node] for node in path), next_token),
        )
        self._count(outcome)
        return path, next_token, outcome

    def _room(self) -> int:
        """Return the number of drafted tokens that the window and the KV caches have room for."""
        context = self._steps.context
        room: int = context.state.window - 1
        if context.state.capacity is not None:
            # drafted tokens must not make the caches look full: that would end the answer
            room = min(room, context.state.capacity - len(context.tokens) - 2)
        return room

    def _choose_shape(self, outlook: Outlook) -> tuple[Shape, Shape]:
        """Return (the policy's shape, its part that fits the answer, the window and the caches)."""
        if self.figures.problem and not self._drafter.goes_on:
            return NO_DRAFT, NO_DRAFT
        chosen = self._policy.choose(outlook)
        # a round yields at most one token more than the draft's depth
        return chosen, chosen.within(self._remaining() - 1, self._room())

    def forced(self) -> Draft:
        """Return a draft of the tokens that the answer's grammar forces."""
        mask = self._steps.sampler.mask
        room = 0 if mask is None else min(self._remaining() - 1, self._room())
        if mask is None or room <= 0:
            return NOTHING
        tokens = tuple(mask.forced(room))
        return Draft(tokens, (None,) * len(tokens))

    def _draft(self, pending: int, shape: Shape) -> Draft:
        if not shape.nodes:
            return NOTHING
        steps = self._steps
        try:
            draft = self._drafter.propose(
                steps.context.tokens, pending, shape, steps.sampler, steps.recent
            )
        except EdgeError as problem:
            # a drafter only saves time: the answer continues without it
            self.figures.problem = str(problem)
            return NOTHING
        mask = steps.sampler.mask
        if mask is None or draft.parents is not None:
            return draft
        # tokens drawn from a distribution are within the grammar, so cutting changes no odds
        kept = mask.within(draft.tokens)
        return Draft(draft.tokens[:kept], draft.drawn_from[:kept])

    def _verify(self, pending: int, draft: Draft) -> tuple[list[int], int]:
        """Run the draft through the target and keep the accepted path.

        Returns (accepted nodes, next token).
        """
        steps, context = self._steps, self._steps.context
        if not draft.tokens:
            return [], steps.step(pending)
        parents = None
        if draft.parents is not None:  # the pending token is the root of the tree
            parents = (-1, *(parent + 1 for parent in draft.parents))
        logits = context.verify((pending, *draft.tokens), parents)

        recent = steps.recent[-self._remembered :] if self._remembered else []

        def target(node: int) -> Row:
            path = draft.path(node)
            row = steps.allowed(logits[node + 1], path)
            if not self._remembered:
                return Row(row, recent)
            return Row(row, recent + [token for token in path if token not in steps.special])

        path, next_token = self._rule.accept(draft, target, steps.sampler, steps.special)
        tokens = (*(draft.tokens[node] for node in path), next_token)
        for node, token in zip((-1, *path), tokens, strict=True):
            steps.note(logits[node + 1], token)
        if draft.parents is None:
            context.rewind(len(draft.tokens) - len(path))
        else:
            last = path[-1] if path else -1
            context.keep(last + 1, (pending, *draft.path(last)))
        return path, next_token

    def _count(self, outcome: Round) -> None:
        figures = self.figures
        figures.draft_s += outcome.draft_s
        if not outcome.nodes:
            figures.steps += 1
            return
        figures.verify_s += outcome.verify_s
        branches = outcome.asked.branches
        for share in (figures, figures.sources[outcome.asked.source]):
            share.rounds += 1
            share.drafted += outcome.nodes
            share.accepted += len(outcome.ranks)
            share.shapes[branches] = share.shapes.get(branches, 0) + 1


@dataclass(frozen=True)
class Drafting:
    """The parts of speculative decoding in a session.

    Attributes:
        drafter: proposes tokens.
        policy: chooses the shapes of drafts.
        window: number of tokens that the target's state must be able to rewind.
        rule: acceptance rule.
    """

    drafter: Drafter
    policy: Policy
    window: int
    rule: Rule

    def begin(self, steps: Stepper, answer: Answer) -> Speculative:
        """Return the generator of an answer's tokens, which also fills in the answer's figures."""
        speculative = Speculative(
            steps, self.drafter, self.policy, self.rule,
            remaining=lambda: answer.params.max_tokens - len(answer.tokens),
        )  # fmt: skip
        answer.speculation = speculative.figures
        return speculative
