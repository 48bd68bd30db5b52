"""What a drafter is, and what it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edge.runtime.sampling import Distribution, Sampler
from edge.runtime.speculate.policy import NO_OUTLOOK, Outlook
from edge.runtime.speculate.shape import Shape


class Draft(NamedTuple):
    """Proposed tokens: a chain, or a tree whose root is the token before them.

    Attributes:
        tokens: of its nodes, parents before children; none when the drafter has nothing to say.
        drawn_from: the distribution each was drawn from after the children of its parent that come
            before it; None for a token that was chosen, not drawn, which is the distribution with
            that token alone.
        parents: of each node, -1 the root; None for a chain, whose every parent is the node before.
    """

    tokens: tuple[int, ...]
    drawn_from: tuple[Distribution | None, ...]
    parents: tuple[int, ...] | None = None

    def children(self, node: int) -> Sequence[int]:
        """Children of a node, -1 for the root, in the order in which they were drawn."""
        if self.parents is None:
            return (node + 1,) if node + 1 < len(self.tokens) else ()
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """The tokens from the root's child to a node; none for -1."""
        if self.parents is None:
            return [*self.tokens[: node + 1]]
        said: list[int] = []
        while node != -1:
            said.append(self.tokens[node])
            node = self.parents[node]
        return said[::-1]

    def outcome(self, path: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Round`: (how many children there were, which were accepted), along a path."""
        if self.parents is None:
            more = len(path) < len(self.tokens)
            return (1,) * len(path) + (int(more),), (0,) * len(path)
        families = [self.children(node) for node in (-1, *path)]
        ranks = [family.index(node) for family, node in zip(families, path, strict=False)]
        return tuple(map(len, families)), tuple(ranks)


NOTHING = Draft((), ())


class Drafter(Protocol):
    """Proposes what may follow. It keeps what it needs between rounds and forgets on its own what
    the target did not accept: every call names all tokens there are.
    """

    @property
    def name(self) -> str: ...

    def begin(self) -> None:
        """An answer begins. From one call to the next one tokens are added only, the
        pending one first: none but the new ones need be looked at. Now any may have changed.
        """
        return

    def outlook(self, tokens: Sequence[int], pending: int) -> Outlook:
        """What is known without drafting; comes before each call of `propose`, with the same
        tokens.
        """
        return NO_OUTLOOK

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """Tokens to follow `tokens` and `pending`: at most as deep, and as many, as `shape` says.

        `sampler`: whose parameters and random numbers to draw with. `recent`: what its repetition
        penalty looks at. Raises EdgeError when its model fails: it is then not asked again in this
        answer, unless it `goes_on`.
        """
        ...

    @property
    def goes_on(self) -> bool:
        """Whether something of it still drafts in this answer when `propose` has failed."""
        return False

    @property
    def nbytes(self) -> int:
        """Memory it holds besides its model's weights."""
        ...
