"""Which drafted tokens stand, and what comes after them: rejection sampling.

Fast inference from Transformers via speculative decoding, arXiv 2211.17192, algorithm 1: a token
drawn from q stands with probability min(1, p/q); where it does not, the next token comes from
max(p - q, 0), normalized; when all stand, from the target's next distribution. In a tree the next
child of the same node is then tried, that residual being its p (SpecInfer, arXiv 2305.09781,
algorithm 2). Children may be drawn independently, or each from what its earlier siblings left of q
(arXiv 2402.14160): all that matters is that q is what this one was drawn from. What comes out is
distributed as p, whatever q is. A token that was chosen and not drawn has q = 1. At temperature 0
all p are single tokens, and this is the comparison with the target's own choice.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge.runtime.speculate.draft import Distribution, Draft

Uniform = Callable[[], float]


def accept(
    draft: Draft, target: Callable[[int], Distribution], uniform: Uniform
) -> tuple[list[int], int]:
    """(the nodes that stand, from the root on; the token after them).

    `target(node)` is the target's distribution after a node, -1 the root; it is asked for no more
    of them than are needed. `uniform` draws from [0, 1).
    """
    children = draft.children()
    path: list[int] = []
    node = -1
    while True:
        standing, rest = _stands(target(node), children[node + 1], draft, uniform)
        if standing is None:
            return path, draw(rest, uniform)
        node = standing
        path.append(node)


def _stands(
    p: Distribution, siblings: list[int], draft: Draft, uniform: Uniform
) -> tuple[int | None, Distribution]:
    """(the first of the siblings to stand, or None; what is left of p)."""
    for node in siblings:
        token, q = draft.tokens[node], draft.drawn_from[node]
        ratio = p.of(token) / (1.0 if q is None else q.of(token))
        if ratio >= 1 or (ratio > 0 and uniform() < ratio):
            return node, p
        p = residual(p, token, q)
    return None, p


def residual(p: Distribution, token: int, q: Distribution | None) -> Distribution:
    """max(p - q, 0), normalized, after `token` drawn from q (None: chosen) was refused."""
    if q is None:
        rest = np.where(p.ids == token, 0.0, p.probabilities)
    else:
        order = np.argsort(q.ids)
        place = np.minimum(np.searchsorted(q.ids, p.ids, sorter=order), len(order) - 1)
        shared = q.ids[order[place]] == p.ids
        rest = p.probabilities - np.where(shared, q.probabilities[order[place]], 0.0)
    possible = rest > 0
    # p and q are equal up to rounding: then no token is refused but by rounding
    if not possible.any():
        return p
    rest = rest[possible]
    return Distribution(p.ids[possible], rest / rest.sum())


def draw(p: Distribution, uniform: Uniform) -> int:
    """A token; no random number is used where there is one alone."""
    if len(p.ids) == 1:
        return int(p.ids[0])
    sums = np.cumsum(p.probabilities)
    index = int(np.searchsorted(sums, uniform() * float(sums[-1]), side="right"))
    return int(p.ids[min(index, len(sums) - 1)])
