"""Drafts, and the interface of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edge.runtime.sampling import Distribution, Sampler
from edge.runtime.speculate.policy import NO_OUTLOOK, Outlook
from edge.runtime.speculate.shape import Shape


class Draft(NamedTuple):
    """Proposed tokens: a chain, or a tree whose root is the token before them.

    Attributes:
        tokens: token of each node, parents before children; empty without a proposal.
        drawn_from: distribution that each token was drawn from, given its earlier siblings; None
            for a token that was chosen rather than drawn, which counts as probability 1.
        parents: parent of each node, -1 for the root; None for a chain.
    """

    tokens: tuple[int, ...]
    drawn_from: tuple[Distribution | None, ...]
    parents: tuple[int, ...] | None = None

    def children(self, node: int) -> Sequence[int]:
        """Return the children of a node, -1 for the root, in the order they were drawn."""
        if self.parents is None:
            return (node + 1,) if node + 1 < len(self.tokens) else ()
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root's child to a node; none for -1."""
        if self.parents is None:
            return [*self.tokens[: node + 1]]
        path: list[int] = []
        while node != -1:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def outcome(self, path: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (`offered`, `ranks`) of `Round` for the accepted path."""
        if self.parents is None:
            has_more = len(path) < len(self.tokens)
            return (1,) * len(path) + (int(has_more),), (0,) * len(path)
        families = [self.children(node) for node in (-1, *path)]
        ranks = [family.index(node) for family, node in zip(families, path, strict=False)]
        return tuple(map(len, families)), tuple(ranks)


NOTHING = Draft((), ())


class Drafter(Protocol):
    """Proposes the tokens that may follow. It keeps its own state between rounds and drops rejected
    tokens itself: every call passes all tokens so far.
    """

    @property
    def name(self) -> str: ...

    def begin(self) -> None:
        """Start an answer. Any tokens may have changed before it; within an answer, each call only
        appends tokens, the pending one first.
        """
        return

    def outlook(self, tokens: Sequence[int], pending: int) -> Outlook:
        """Return what is known without drafting. Called before each `propose`, with the same
        tokens.
        """
        return NO_OUTLOOK

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """Propose tokens to follow `tokens` and `pending`, within the bounds of `shape`.

        Args:
            sampler: provides the sampling parameters and random numbers.
            recent: tokens that the sampler's repetition penalty considers.

        Raises EdgeError if its model fails. It is then not called again in this answer unless
        `goes_on`.
        """
        ...

    @property
    def goes_on(self) -> bool:
        """Whether part of it can still draft in this answer after `propose` has failed."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of memory besides its model's weights."""
        ...
