"""Which drafted tokens stand, and what comes after them: rejection sampling.

Fast inference from Transformers via speculative decoding, arXiv 2211.17192, algorithm 1: a token
drawn from q stands with probability min(1, p/q); where it does not, the next token comes from
max(p - q, 0), normalized; when all stand, from the target's next distribution. In a tree the next
child of the same node is then tried, that residual being its p (SpecInfer, arXiv 2305.09781,
algorithm 2). Children may be drawn independently, or each from what its earlier siblings left of q
(arXiv 2402.14160): all that matters is that q is what this one was drawn from. What comes out is
distributed as p, whatever q is. A token that was chosen and not drawn has q = 1. At temperature 0 a
token stands that is the target's own choice (`agree`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge.runtime.sampling import Distribution
from edge.runtime.speculate.draft import Draft

Uniform = Callable[[], float]


def agree(draft: Draft, choice: Callable[[int], int]) -> tuple[list[int], int]:
    """(the nodes that are what the target says itself, from the root on; what it says after them).

    `choice(node)` is the target's after a node, -1 the root.
    """
    path: list[int] = []
    node = -1
    while True:
        token = choice(node)
        same = [child for child in draft.children(node) if draft.tokens[child] == token]
        if not same:
            return path, token
        node = same[0]
        path.append(node)


def accept(
    draft: Draft, target: Callable[[int], Distribution], uniform: Uniform
) -> tuple[list[int], int]:
    """(the nodes that stand, from the root on; the token after them).

    `target(node)` is the target's distribution after a node, -1 the root; it is asked for no more
    of them than are needed. `uniform` draws from [0, 1).
    """
    path: list[int] = []
    node = -1
    while True:
        standing, rest = _stands(target(node), draft.children(node), draft, uniform)
        if standing is None:
            return path, rest.draw(uniform())
        node = standing
        path.append(node)


def _stands(
    p: Distribution, siblings: Sequence[int], draft: Draft, uniform: Uniform
) -> tuple[int | None, Distribution]:
    """(the first of the siblings to stand, or None; what is left of p)."""
    for node in siblings:
        token, q = draft.tokens[node], draft.drawn_from[node]
        ratio = p.of(token) / (1.0 if q is None else q.of(token))
        if ratio >= 1 or (ratio > 0 and uniform() < ratio):
            return node, p
        rest = p.without(token) if q is None else p.minus(q)
        # where p and q are equal up to rounding, no token is refused but by rounding
        p = rest if rest.total else p
    return None, p
