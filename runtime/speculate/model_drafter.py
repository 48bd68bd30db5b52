"""Drafter that runs another bundle with the same vocabulary."""

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
    """Return the number of common ids, from 0 on; 0 unless one vocabulary is a prefix of the other.

    Files of one vocabulary differ (settings, a chat model's added control tokens), so they are
    compared id by id: 50,000 take 20 ms.
    """
    count = min(target.vocab_size, drafter.vocab_size)
    if target.fingerprint == drafter.fingerprint:
        return count
    same = all(target.id_to_piece(i) == drafter.id_to_piece(i) for i in range(count))
    return count if same else 0


@dataclass(frozen=True)
class Vocabulary:
    """Maps token ids between a target and its drafter.

    Attributes:
        size: number of ids of the target's tokenizer.
        shared: number of ids, from 0 on, that the drafter has too.
        stand_in: id that the drafter reads in place of any other.
    """

    size: int
    shared: int
    stand_in: int = 0

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Convert the target's tokens for the drafter."""
        if self.shared == self.size:
            return [*tokens]
        return [token if token < self.shared else self.stand_in for token in tokens]

    def allowed(self, logits: Logits) -> Logits:
        """Convert the drafter's logits to the target's ids, [size], -inf for ids it lacks."""
        if self.shared == self.size:
            return logits[: self.size]
        padded = np.full(self.size, -np.inf, np.float32)
        padded[: self.shared] = logits[: self.shared]
        return padded


class Growth:
    """A tree under construction, one depth at a time."""

    def __init__(self, sampler: Sampler, recent: list[int], special: Collection[int]) -> None:
        """`recent`: tokens that the penalties consider besides a node's own path; `special`: tokens
        of the path that they ignore.
        """
        self._sampler = sampler
        self._special = special
        self._remembered = sampler.params.remembered
        self._recent = recent[-self._remembered :] if self._remembered else []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._drawn_from: list[Distribution | None] = []
        # nodes of the last depth; None in place of a child that a node before it does not have
        self._level: list[int | None] = [-1]

    def add(self, logits: Iterable[Logits], count: int) -> list[int]:
        """Add up to `count` children to each node of the last depth.

        `logits` are the logits after each node. Returns the children's tokens, `count` per node,
        with 0 for missing ones.
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
        """Return the tokens that the penalties consider after a node."""
        if not self._remembered:
            return self._recent
        return self._recent + [t for t in self._path(node) if t not in self._special]

    def _path(self, node: int) -> list[int]:
        """Return the tokens from the root to a node."""
        path: list[int] = []
        while node != -1:
            path.append(self._tokens[node])
            node = self._parents[node]
        return path[::-1]

    def draft(self) -> Draft:
        parents = tuple(self._parents)
        chain = parents == tuple(range(-1, len(parents) - 1))
        return Draft(tuple(self._tokens), tuple(self._drawn_from), None if chain else parents)


def children(
    sampler: Sampler, logits: Logits, history: Sequence[int], count: int
) -> list[tuple[int, Distribution | None]]:
    """Draw up to `count` distinct tokens, each with its distribution: q without earlier ones.

    At temperature 0 they are the likeliest tokens, with None for the distribution.
    """
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
    """Drafts with a second model that steps ahead of the target.

    Before each draft its state is brought up to the target's tokens: rejected tokens are rewound,
    new ones are run. It draws with the target's sampling parameters, so it seldom proposes a token
    that the target cannot draw.

    Where a tree branches, the state is copied to a state with one sequence per node of that depth
    (Mamba Drafters, section 3.1), and the sequences then step together.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        vocabulary: Vocabulary,
        special: set[int],
        batches: Mapping[int, State],
    ) -> None:
        """Create a drafter.

        Args:
            context: context of the drafting model, with a window for the longest draft.
            special: ids of the target that penalties ignore.
            batches: states by number of sequences, one for each width of the trees above the last
                depth.
        """
        self._name = name
        self.context = context
        self._vocabulary = vocabulary
        self._special = special
        self._batches = batches
        self._known = 0  # number of the conversation's tokens that the state has consumed

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
            logits = self._catch_up(tokens, pending)
            return self._grow(logits, shape, Growth(sampler, recent, self._special))
        except EdgeError:
            # the next answer must not see a broken state
            self.context.clear()
            self._known = 0
            raise

    def _catch_up(self, tokens: Sequence[int], pending: int) -> Logits:
        """Run the new tokens and return the logits after the pending token."""
        known, read = self._known, self._vocabulary.read
        unread = read([*tokens[known:], pending])
        reused = self.context.align(unread, known)
        if reused < known:  # its state does not go back that far
            known, unread = 0, read([*tokens, pending])
        self._known = len(tokens) + 1
        return self.context.advance(unread[reused - known :])

    def _grow(self, logits: Logits, shape: Shape, growth: Growth) -> Draft:
        rows: Sequence[Logits] = [logits]
        state, allowed = self.context.state, self._vocabulary.allowed
        for depth, count in enumerate(shape.branches, 1):
            tokens = growth.add(map(allowed, rows), count)
            if depth < shape.depth:
                rows, state = self._step(tokens, state)
        return growth.draft()

    def _step(self, tokens: list[int], state: State) -> tuple[Sequence[Logits], State]:
        """Consume one token per sequence, after spreading the state if there are more tokens.

        Returns the logits of each sequence and the state used.
        """
        if len(tokens) == 1:
            return [self.context.step(tokens[0])], state
        if len(tokens) > state.batch:
            batch_state = self._batches[len(tokens)]
            state.spread(batch_state)
            state = batch_state
        logits = self.context.engine.run(np.asarray(tokens, np.int64)[:, None], state)
        return list(logits[:, 0]), state


def batch_sizes(shapes: Sequence[Shape]) -> list[int]:
    """Return the batch sizes of the states that these shapes need, besides 1."""
    return sorted({width for shape in shapes for width in shape.widths[:-1] if width > 1})
