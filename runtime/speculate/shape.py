"""Shapes of drafts, which a policy chooses: the children per node at each depth, and the source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Literal

DraftSource = Literal["model", "look-up", "grammar"]
MODEL: DraftSource = "model"
LOOK_UP: DraftSource = "look-up"
GRAMMAR: DraftSource = "grammar"


@dataclass(frozen=True)
class Shape:
    """The shape of a draft: a tree (Mamba Drafters, section 3.1), a chain, or nothing.

    Attributes:
        branches: number of children of every node at each depth: (1, 1, 1) is a chain of three,
            (3, 2, 1) a tree of 3 + 6 + 6 nodes, () no draft.
        source: source of the draft, for drafters that combine several.
    """

    branches: tuple[int, ...] = ()
    source: DraftSource = MODEL

    @staticmethod
    def of_chain(length: int, source: DraftSource = MODEL) -> Shape:
        return Shape((1,) * length, source)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of nodes at each depth."""
        return tuple(accumulate(self.branches, mul))

    @cached_property
    def nodes(self) -> int:
        return sum(self.widths)

    @property
    def depth(self) -> int:
        return len(self.branches)

    @cached_property
    def chain(self) -> bool:
        """Whether no node has two children."""
        return all(count == 1 for count in self.branches)

    def within(self, depth: int, nodes: int) -> Shape:
        """Return the upper part of the shape, with at most `depth` depths and `nodes` nodes.

        If not even the first depth fits into `nodes`, that depth is kept with fewer children.
        """
        if depth >= self.depth and nodes >= self.nodes:
            return self
        kept = self.branches[: max(0, depth)]
        while kept and sum(accumulate(kept, mul)) > nodes:
            kept = kept[:-1]
        if not kept and self.branches and depth > 0 and nodes > 0:
            kept = (min(self.branches[0], nodes),)
        return Shape(kept, self.source)

    def __str__(self) -> str:
        if self.chain:
            return str(self.depth)
        return ",".join(map(str, self.branches))


NO_DRAFT = Shape()
