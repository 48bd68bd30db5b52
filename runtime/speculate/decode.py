"""Where an answer's tokens come from: one step each, or rounds of drafting and verifying."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from edge.errors import EngineError
from edge.runtime.context import Context, Logits
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.accept import accept_chain
from edge.runtime.speculate.draft import NOTHING, Distribution, Draft, Drafter
from edge.runtime.speculate.policy import Policy


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


class Plain:
    """Step and sample: tokens from the logits after the prompt on, without end."""

    figures = None

    def __init__(self, source: Source) -> None:
        self._source = source

    def tokens(self, logits: Logits) -> Iterator[int]:
        source = self._source
        while True:
            token = source.sampler(source.allowed(logits), source.recent)
            source.context.pending = token
            yield token
            # as long as the engine finds the likeliest token itself, no logits are looked at
            while source.greedy:
                found = source.context.step_greedily(token, source.vocab_size)
                if not isinstance(found, int):
                    logits = found
                    break
                source.context.pending = token = found
                yield token
            else:
                logits = source.context.step(token)

    def settle(self) -> None:
        """See `Speculative.settle`: the last token is always the pending one."""


@dataclass
class Speculation:
    """What drafting did during one answer.

    Attributes:
        drafter: its name.
        rounds: verifying runs.
        drafted, accepted: tokens over all of them.
        steps: tokens that came from plain steps instead.
        draft_s, verify_s: seconds in the drafter, and in the target's verifying runs.
        lengths: draft length asked for → how many rounds.
        problem: why the drafter was given up, "" while it works.
    """

    drafter: str
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verifying run yields, the target's own one included; None without any run."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None


class Speculative:
    """Rounds of drafting and verifying; plain steps where the policy says so or nothing is drafted.

    Each round: the target consumes the pending token and the draft in one run, keeps the accepted
    ones, and is rewound by the others (The Mamba in the Llama, algorithm 2; the state goes back by
    choosing a slot or by replay, whichever the engine does).
    """

    def __init__(self, source: Source, drafter: Drafter, policy: Policy) -> None:
        self.figures = Speculation(drafter.name)
        self._source = source
        self._drafter = drafter
        self._policy = policy
        self._last = 0
        self._ahead = 0

    def tokens(self, logits: Logits) -> Iterator[int]:
        source, context = self._source, self._source.context
        token = source.sampler(source.allowed(logits), source.recent)
        while True:
            context.pending = self._last = token
            yield token
            began = time.perf_counter()
            arm, count = self._length()
            draft = self._draft(token, count)
            if draft.tokens:
                accepted, following = self._verify(token, draft)
                # what the end of an answer cut short says nothing of the arm
                if count == arm:
                    self._policy.learn(arm, accepted + 1, time.perf_counter() - began)
                for index in range(accepted):
                    # were the answer to end here, the tokens from this one on would be one run too
                    # many: it was sampled, not yet consumed
                    self._last, self._ahead = draft.tokens[index], accepted - index
                    yield self._last
                self._ahead = 0
                token = following
            else:
                logits = context.step(token)
                token = source.sampler(source.allowed(logits), source.recent)
                self.figures.steps += 1
                self._policy.learn(0, 1, time.perf_counter() - began)

    def settle(self) -> None:
        """The answer ended at the token yielded last: make it the context's pending one."""
        if self._ahead:
            self._source.context.rewind(self._ahead)
            self._source.context.pending = self._last
            self._ahead = 0

    def _length(self) -> tuple[int, int]:
        """(what the policy chose, how much of it answer, window and KV caches have room for)."""
        if self.figures.problem:
            return 0, 0
        context = self._source.context
        # one more than the draft comes out of a round
        room = min(self._source.remaining() - 1, context.state.window - 1)
        if context.state.capacity is not None:
            # with drafted tokens in them the caches must not look full: that would end the answer
            room = min(room, context.state.capacity - len(context.tokens) - 2)
        chosen = self._policy.choose()
        return chosen, max(0, min(chosen, room))

    def _draft(self, pending: int, count: int) -> Draft:
        if not count:
            return NOTHING
        source = self._source
        began = time.perf_counter()
        try:
            draft = self._drafter.propose(
                source.context.tokens, pending, count, source.sampler, source.recent
            )
        except EngineError as problem:
            # a drafter only makes things quicker: without it the answer goes on
            self.figures.problem = str(problem)
            return NOTHING
        finally:
            self.figures.draft_s += time.perf_counter() - began
        if draft.tokens:
            self.figures.lengths[count] = self.figures.lengths.get(count, 0) + 1
        return draft

    def _verify(self, pending: int, draft: Draft) -> tuple[int, int]:
        """Run the draft through the target, keep what stands; how many do, and the next token."""
        source, context = self._source, self._source.context
        began = time.perf_counter()
        logits = context.verify((pending, *draft.tokens))
        history = [token for token in draft.tokens if token not in source.special]

        def target(index: int) -> Distribution:
            said = source.recent + history[: _ordinary(draft.tokens[:index], source.special)]
            return Distribution(*source.sampler.probabilities(source.allowed(logits[index]), said))

        accepted, following = accept_chain(draft, target, source.sampler.rng.random)
        context.rewind(len(draft.tokens) - accepted)
        figures = self.figures
        figures.rounds += 1
        figures.drafted += len(draft.tokens)
        figures.accepted += accepted
        figures.verify_s += time.perf_counter() - began
        return accepted, following


def _ordinary(tokens: tuple[int, ...], special: Collection[int]) -> int:
    return sum(token not in special for token in tokens)
