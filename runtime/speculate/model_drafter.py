"""Drafting with another bundle of the same vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge.errors import EdgeError
from edge.runtime.context import Context, Logits
from edge.runtime.sampling import Distribution, Sampler
from edge.runtime.speculate.draft import NOTHING, Draft, Drafter
from edge.runtime.speculate.shape import Shape
from edge.runtime.state import State
from edge.text.tokenizer import Tokenizer


def shared_ids(target: Tokenizer, drafter: Tokenizer) -> int:
    """How many ids, from 0 on, both spell alike; 0 unless one vocabulary begins with the other.

    Files of one vocabulary differ (other settings, a chat model's added control tokens), so they
    are compared id by id: 50,000 take 20 ms.
    """
    count = min(target.vocab_size, drafter.vocab_size)
    if target.fingerprint == drafter.fingerprint:
        return count
    same = all(target.id_to_piece(i) == drafter.id_to_piece(i) for i in range(count))
    return count if same else 0


@dataclass(frozen=True)
class Vocabulary:
    """Ids of a target as its drafter takes and gives them.

    Attributes:
        size: ids of the target's tokenizer.
        shared: of them, the first ones, those that the drafter has too.
        stand_in: what the drafter reads in place of the others.
    """

    size: int
    shared: int
    stand_in: int = 0

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of the target, for the drafter."""
        if self.shared == self.size:
            return [*tokens]
        return [token if token < self.shared else self.stand_in for token in tokens]

    def allowed(self, logits: Logits) -> Logits:
        """The drafter's logits as of the target's tokens: [size], those it has not being -inf."""
        if self.shared == self.size:
            return logits[: self.size]
        padded = np.full(self.size, -np.inf, np.float32)
        padded[: self.shared] = logits[: self.shared]
        return padded


class Growth:
    """A tree that is being drafted, one depth after another."""

    def __init__(self, sampler: Sampler, recent: list[int], special: Collection[int]) -> None:
        """`recent`: what the penalties look at besides a node's own path; `special`: what
        it does not look at.
        """
        self._sampler = sampler
        self._special = special
        self._remembered = sampler.params.remembered
        self._recent = recent[-self._remembered :] if self._remembered else []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._drawn_from: list[Distribution | None] = []
        # the nodes of the last depth; None where one before it had fewer children than asked for
        self._level: list[int | None] = [-1]

    def add(self, logits: Iterable[Logits], count: int) -> list[int]:
        """Give each node of the last depth `count` children, or as many as there can be; their
        tokens, 0 where there is none.

        `logits`: after each node, of the tokens that may be drafted.
        """
        level: list[int | None] = []
        for node, row in zip(self._level, logits, strict=True):
            missing = count
            if node is not None:
                if self._sampler.mask is not None:
                    row = self._sampler.allowed(row, self._path(node))
                for token, q in children(self._sampler, row, self._history(node), count):
                    level.append(len(self._tokens))
                    self._tokens.append(token)
                    self._parents.append(node)
                    self._drawn_from.append(q)
                    missing -= 1
            level += [None] * missing
        self._level = level
        return [0 if node is None else self._tokens[node] for node in level]

    def _history(self, node: int) -> list[int]:
        """What the penalties look at after a node."""
        if not self._remembered:
            return self._recent
        return self._recent + [t for t in self._path(node) if t not in self._special]

    def _path(self, node: int) -> list[int]:
        """The tokens up to a node."""
        said: list[int] = []
        while node != -1:
            said.append(self._tokens[node])
            node = self._parents[node]
        return said[::-1]

    def draft(self) -> Draft:
        parents = tuple(self._parents)
        chain = parents == tuple(range(-1, len(parents) - 1))
        return Draft(tuple(self._tokens), tuple(self._drawn_from), None if chain else parents)


def children(
    sampler: Sampler, logits: Logits, history: Sequence[int], count: int
) -> list[tuple[int, Distribution | None]]:
    """Different tokens, and what each was drawn from: after a first one, what it left of q."""
    if sampler.params.temperature == 0:
        return [(token, None) for token in sampler.likeliest(logits, history, count)]
    q = sampler.distribution(logits, history)
    drawn: list[tuple[int, Distribution | None]] = []
    while True:
        token = q.draw(sampler.rng.random())
        drawn.append((token, q))
        if len(drawn) == count:
            return drawn
        q = q.without(token)
        if not q.total:
            return drawn


class ModelDrafter(Drafter):
    """A second model that steps ahead of the target.

    Its state follows the target's tokens: what was not accepted is rewound, what it has not seen is
    run, before it drafts again. It draws with the target's sampling parameters, so that a token the
    target cannot draw is seldom proposed.

    Where a tree branches, the state is copied into one of more sequences, one for each node of that
    depth (Mamba Drafters, section 3.1), which then step together.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        vocabulary: Vocabulary,
        special: set[int],
        batches: Mapping[int, State],
    ) -> None:
        """`context`: of the drafting model, made for runs of the longest draft. `special`: ids of
        the target that no penalty looks at. `batches`: states of that many sequences,
        one for each width that its trees have above the last depth.
        """
        self._name = name
        self.context = context
        self._vocabulary = vocabulary
        self._special = special
        self._batches = batches
        self._known = 0  # of the conversation's first tokens: the state has consumed just these

    @property
    def name(self) -> str:
        return self._name

    @property
    def nbytes(self) -> int:
        states = (self.context.state, *self._batches.values())
        return sum(state.nbytes for state in states)

    def begin(self) -> None:
        self._known = 0

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        capacity = self.context.state.capacity
        if capacity is not None:
            shape = shape.within(capacity - len(tokens), shape.nodes)
        if not shape.nodes:
            return NOTHING
        try:
            logits = self._caught_up(tokens, pending)
            return self._grown(logits, shape, Growth(sampler, recent, self._special))
        except EdgeError:
            # whatever is wrong with the state, the next answer is not to find it
            self.context.clear()
            self._known = 0
            raise

    def _caught_up(self, tokens: Sequence[int], pending: int) -> Logits:
        """Logits after all there is, of which what is new is run."""
        known, read = self._known, self._vocabulary.read
        wanted = read([*tokens[known:], pending])
        reused = self.context.align(wanted, known)
        if reused < known:  # its state does not go back that far
            known, wanted = 0, read([*tokens, pending])
        self._known = len(tokens) + 1
        return self.context.advance(wanted[reused - known :])

    def _grown(self, logits: Logits, shape: Shape, growth: Growth) -> Draft:
        rows: Sequence[Logits] = [logits]
        state, allowed = self.context.state, self._vocabulary.allowed
        for depth, count in enumerate(shape.branches, 1):
            tokens = growth.add(map(allowed, rows), count)
            if depth < shape.depth:
                rows, state = self._stepped(tokens, state)
        return growth.draft()

    def _stepped(self, tokens: list[int], state: State) -> tuple[Sequence[Logits], State]:
        """Consume a token in every sequence, spreading them first where there are more tokens;
        logits of each, and the state.
        """
        if len(tokens) == 1:
            return [self.context.step(tokens[0])], state
        if len(tokens) > state.batch:
            wide = self._batches[len(tokens)]
            state.spread(wide)
            state = wide
        logits = self.context.engine.run(np.asarray(tokens, np.int64)[:, None], state)
        return list(logits[:, 0]), state


def batch_sizes(shapes: Sequence[Shape]) -> list[int]:
    """Batch sizes of the states that these shapes need, besides the state of one sequence."""
    return sorted({width for shape in shapes for width in shape.widths[:-1] if width > 1})
