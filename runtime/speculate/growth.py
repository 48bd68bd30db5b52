"""Drafting a tree: the nodes of one depth after another."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edge.runtime.context import Logits
from edge.runtime.distribution import Distribution
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.draft import Draft


class Growth:
    """A tree that is being drafted.

    Attributes:
        level: the nodes of the depth that was added last, -1 the root; None where a node of the
            depth before had fewer children than asked for.
    """

    def __init__(self, sampler: Sampler, recent: list[int], special: Collection[int]) -> None:
        """`recent`: what the repetition penalty looks at besides a node's own path; `special`: what
        it does not look at.
        """
        self.level: list[int | None] = [-1]
        self._sampler = sampler
        self._special = special
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._drawn_from: list[Distribution | None] = []
        self._remembered = sampler.params.remembered
        # of the root, then of every node
        self._history = [recent[-self._remembered :] if self._remembered else []]

    def add(self, logits: Sequence[Logits], count: int) -> None:
        """Give each node of the last depth `count` children, or as many as there can be.

        `logits`: after each, of the tokens that may be drafted.
        """
        added: list[int | None] = []
        for node, row in zip(self.level, logits, strict=True):
            drawn: list[tuple[int, Distribution | None]] = []
            if node is not None:
                drawn = children(self._sampler, row, self._history[node + 1], count)
                added += [self._child(node, token, q) for token, q in drawn]
            added += [None] * (count - len(drawn))
        self.level = added

    def _child(self, parent: int, token: int, q: Distribution | None) -> int:
        history = self._history[parent + 1]
        if self._remembered and token not in self._special:
            history = [*history, token]
        self._history.append(history)
        self._tokens.append(token)
        self._parents.append(parent)
        self._drawn_from.append(q)
        return len(self._tokens) - 1

    def tokens(self) -> list[int]:
        """Of the last depth; something where there is no node."""
        return [0 if node is None else self._tokens[node] for node in self.level]

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
