"""Where an answer's tokens come from: one step each, or rounds of drafting and verifying."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from edge.errors import EdgeError
from edge.runtime.context import Context, Logits
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.draft import NOTHING, Draft, Drafter
from edge.runtime.speculate.policy import Outlook, Policy, Round
from edge.runtime.speculate.rule import EXACT, Row, Rule
from edge.runtime.speculate.shape import NO_DRAFT, DraftSource, Shape


@dataclass
class Source:
    """What both ways need of an answer.

    Attributes:
        context: of the target.
        sampler: with the answer's parameters and random numbers.
        allowed: logits cut to the ids that may be drawn.
        recent: what the repetition penalty looks at; the answer appends what it takes.
        special: ids that are never appended to it.
        remaining: how many tokens the answer may still take.
        greedy: whether the likeliest of the first `vocab_size` ids is always what is sampled.
    """

    context: Context
    sampler: Sampler
    allowed: Callable[[Logits], Logits]
    recent: list[int]
    special: Collection[int]
    remaining: Callable[[], int]
    vocab_size: int
    greedy: bool

    def step(self, token: int) -> int:
        """Consume a token and sample the next one, without looking at any logits where the engine
        finds the likeliest itself.
        """
        if self.greedy:
            found = self.context.step_greedily(token, self.vocab_size)
            if isinstance(found, int):
                return found
        else:
            found = self.context.step(token)
        return self.sampler(self.allowed(found), self.recent)


class Plain:
    """Step and sample: tokens from the logits after the prompt on, without end."""

    figures = None

    def __init__(self, source: Source) -> None:
        self._source = source

    def tokens(self, logits: Logits) -> Iterator[int]:
        source = self._source
        token = source.sampler(source.allowed(logits), source.recent)
        while True:
            source.context.pending = token
            yield token
            token = source.step(token)

    def settle(self) -> None:
        """See `Speculative.settle`: the last token is always the pending one."""


@dataclass
class Share:
    """What one source of drafts did: see `Speculation`."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    shapes: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass
class Speculation:
    """What drafting did during one answer.

    Attributes:
        drafter: its name.
        rounds: verifying runs.
        drafted, accepted: tokens over all of them.
        steps: tokens that came from plain steps instead.
        draft_s, verify_s: seconds in the drafter, and in the target's verifying runs.
        shapes: branches of the draft asked for → how many rounds.
        sources: the same of each source that drafted.
        problem: why the drafter, or the model of it, was given up, "" while it works.
        accept: by which rule drafted tokens stood: `exact`, or the likes of `top-3`, which lose.
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
        """Tokens a verifying run yields, the target's own one included; None without any run."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None


class Speculative:
    """Rounds of drafting and verifying; plain steps where the policy says so or nothing is drafted.

    Each round: the target consumes the pending token and the draft in one run and keeps the
    accepted path. Of a chain it is rewound by the rest (The Mamba in the Llama, algorithm 2; the
    state goes back by choosing a slot or by replay, whichever the engine does); of a tree it
    selects the node at the path's end.
    """

    def __init__(
        self, source: Source, drafter: Drafter, policy: Policy, rule: Rule = EXACT
    ) -> None:
        self.figures = Speculation(drafter.name, accept=rule.name)
        self._source = source
        self._drafter = drafter
        self._policy = policy
        self._rule = rule
        self._remembered = source.sampler.params.remembered
        self._last = 0
        self._ahead = 0

    def tokens(self, logits: Logits) -> Iterator[int]:
        source, context = self._source, self._source.context
        self._drafter.begin()
        self._policy.begin(source.sampler.params.temperature == 0)
        token = source.sampler(source.allowed(logits), source.recent)
        while True:
            context.pending = self._last = token
            yield token
            began = time.perf_counter()
            outlook = self._drafter.outlook(context.tokens, token)
            if self._policy.rests(outlook):
                token = source.step(token)
                self.figures.steps += 1
                self._policy.rested(time.perf_counter() - began)
                continue
            asked, shape = self._shape(outlook)
            working = not self.figures.problem
            draft = self._draft(token, shape)
            drafted = time.perf_counter()
            path, following = self._verify(token, draft)
            done = Round(
                shape,
                len(draft.tokens),
                *draft.standing(path),
                drafted - began,
                time.perf_counter() - drafted,
                outlook,
                (*(draft.tokens[node] for node in path), following),
            )
            self._count(done)
            # what the end of an answer cut short says nothing of the shape, nor does a failure
            if shape == asked and not (working and self.figures.problem):
                self._policy.learn(done)
            for index, node in enumerate(path):
                # were the answer to end here, the tokens from this one on would be one run too
                # many: it was sampled, not yet consumed
                self._last, self._ahead = draft.tokens[node], len(path) - index
                yield self._last
            self._ahead = 0
            token = following

    def settle(self) -> None:
        """The answer ended at the token yielded last: make it the context's pending one."""
        if self._ahead:
            self._source.context.rewind(self._ahead)
            self._source.context.pending = self._last
            self._ahead = 0

    def _shape(self, outlook: Outlook) -> tuple[Shape, Shape]:
        """(what the policy chose, how much of it answer, window and KV caches have room for)."""
        if self.figures.problem and not self._drafter.goes_on:
            return NO_DRAFT, NO_DRAFT
        context = self._source.context
        room = context.state.window - 1
        if context.state.capacity is not None:
            # with drafted tokens in them the caches must not look full: that would end the answer
            room = min(room, context.state.capacity - len(context.tokens) - 2)
        chosen = self._policy.choose(outlook)
        # one token more than the draft is deep comes out of a round
        return chosen, chosen.within(self._source.remaining() - 1, room)

    def _draft(self, pending: int, shape: Shape) -> Draft:
        if not shape.nodes:
            return NOTHING
        source = self._source
        try:
            return self._drafter.propose(
                source.context.tokens, pending, shape, source.sampler, source.recent
            )
        except EdgeError as problem:
            # a drafter only makes things quicker: without it the answer goes on
            self.figures.problem = str(problem)
            return NOTHING

    def _verify(self, pending: int, draft: Draft) -> tuple[list[int], int]:
        """Run the draft through the target, keep what stands: its nodes, and the next token."""
        source, context = self._source, self._source.context
        if not draft.tokens:
            return [], source.step(pending)
        if draft.parents is None:
            logits = context.verify((pending, *draft.tokens))
        else:
            # the pending token is the root of the tree
            parents = (-1, *(parent + 1 for parent in draft.parents))
            logits = context.verify_tree((pending, *draft.tokens), parents)

        recent = source.recent[-self._remembered :] if self._remembered else []

        def target(node: int) -> Row:
            row = source.allowed(logits[node + 1])
            if not self._remembered:
                return Row(row, recent)
            said = [token for token in draft.path(node) if token not in source.special]
            return Row(row, recent + said)

        path, following = self._rule.accept(draft, target, source.sampler, source.special)
        if draft.parents is None:
            context.rewind(len(draft.tokens) - len(path))
        else:
            last = path[-1] if path else -1
            context.keep(last + 1, (pending, *draft.path(last)))
        return path, following

    def _count(self, done: Round) -> None:
        figures = self.figures
        figures.draft_s += done.draft_s
        if not done.nodes:
            figures.steps += 1
            return
        figures.verify_s += done.verify_s
        branches = done.asked.branches
        for share in (figures, figures.sources[done.asked.source]):
            share.rounds += 1
            share.drafted += done.nodes
            share.accepted += len(done.ranks)
            share.shapes[branches] = share.shapes.get(branches, 0) + 1
