"""Drafting a tree: the nodes of one depth after another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from edge.runtime.generate import Logits
from edge.runtime.sampling import Distribution, Sampler
from edge.runtime.speculate.draft import Draft


class Growth:
    """A tree that is being drafted, one depth after another."""

    def __init__(self, sampler: Sampler, recent: list[int], special: Collection[int]) -> None:
        """`recent`: what the repetition penalty looks at besides a node's own path; `special`: what
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
        """What the repetition penalty looks at after a node."""
        said: list[int] = []
        while self._remembered and node != -1:
            if self._tokens[node] not in self._special:
                said.append(self._tokens[node])
            node = self._parents[node]
        return self._recent + said[::-1]

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
