"""Drafting with another bundle of the same vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge.errors import EdgeError
from edge.runtime.generate import Context, Logits
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.draft import NOTHING, Draft, Drafter
from edge.runtime.speculate.growth import Growth
from edge.runtime.speculate.shape import Shape
from edge.runtime.speculate.vocabulary import Vocabulary
from edge.runtime.state import State


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
        the target that no repetition penalty looks at. `batches`: states of that many sequences,
        one for each width that its trees have above the last depth.
        """
        self._name = name
        self._context = context
        self._vocabulary = vocabulary
        self._special = special
        self._batches = batches
        self._known = 0  # of the talk's first tokens: the state has consumed just these

    @property
    def name(self) -> str:
        return self._name

    @property
    def nbytes(self) -> int:
        states = (self._context.state, *self._batches.values())
        return sum(state.nbytes for state in states)

    def begin(self) -> None:
        """See `Drafter.begin`."""
        self._known = 0

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """See `Drafter.propose`."""
        capacity = self._context.state.capacity
        if capacity is not None:
            shape = shape.within(capacity - len(tokens), shape.nodes)
        if not shape.nodes:
            return NOTHING
        try:
            logits = self._caught_up(tokens, pending)
            return self._grown(logits, shape, Growth(sampler, recent, self._special))
        except EdgeError:
            # whatever is wrong with the state, the next answer is not to find it
            self._context.clear()
            self._known = 0
            raise

    def _caught_up(self, tokens: Sequence[int], pending: int) -> Logits:
        """Logits after all there is, of which what is new is run."""
        known, read = self._known, self._vocabulary.read
        wanted = read([*tokens[known:], pending])
        reused = self._context.align(wanted, known)
        if reused < known:  # its state does not go back that far
            known, wanted = 0, read([*tokens, pending])
        self._known = len(tokens) + 1
        return self._context.advance(wanted[reused - known :])

    def _grown(self, logits: Logits, shape: Shape, growth: Growth) -> Draft:
        rows: Sequence[Logits] = [logits]
        state, allowed = self._context.state, self._vocabulary.allowed
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
            return [self._context.step(tokens[0])], state
        if len(tokens) > state.batch:
            wide = self._batches[len(tokens)]
            state.spread(wide)
            state = wide
        logits = self._context.engine.run(np.asarray(tokens, np.int64)[:, None], state)
        return list(logits[:, 0]), state


def batch_sizes(shapes: Sequence[Shape]) -> list[int]:
    """Of the states that drafting these takes, besides that of one sequence."""
    return sorted({width for shape in shapes for width in shape.widths[:-1] if width > 1})
