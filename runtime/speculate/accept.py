"""Acceptance rules: which drafted tokens are accepted, and which token follows them.

The exact rule yields what the target alone would have produced. At temperature 0 it accepts a token
that is the target's own choice. Otherwise it uses rejection sampling (Fast inference from
Transformers via speculative decoding, arXiv 2211.17192, algorithm 1): a token drawn from q is
accepted with probability min(1, p/q); after a rejection the next token is drawn from max(p - q, 0),
normalized; if all are accepted, from the target's next distribution. In a tree, a rejection is
followed by a trial of the node's next child, with that residual as p (SpecInfer, arXiv 2305.09781,
algorithm 2). Children may be drawn independently, or each from what its earlier siblings left of q
(arXiv 2402.14160), as long as q is the distribution that this child was drawn from. The output is
distributed as p, whatever q is.

A token that was chosen rather than drawn has q = 1, so p/q is its probability under p. If all
children of a node are chosen, the target draws as without a draft and accepts a child equal to the
drawn token. This accepts as often and takes one random number per token, so look-up drafts do not
change a seeded answer.

MambaByte's rule (arXiv 2401.13660, section 3 and algorithm 1) trades quality for longer accepted
drafts: a drafted byte is accepted while it is among the target's β likeliest. The output is then
neither the target's own choice nor distributed as the target's output. The paper's algorithm keeps
the first rejected byte, its text does not; here no rejected byte is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from edge.errors import InputError
from edge.runtime.context import Logits
from edge.runtime.sampling import Distribution, Sampler
from edge.runtime.speculate.draft import Draft

Uniform = Callable[[], float]


class Row(NamedTuple):
    """The target's output after a node.

    Attributes:
        logits: logits [V], limited to the tokens that may be drawn.
        history: earlier tokens for the penalties.
    """

    logits: Logits
    history: list[int]


class Rule(Protocol):
    """Decides which drafted tokens are accepted."""

    @property
    def name(self) -> str:
        """Name as given in options."""
        ...

    def accept(
        self, draft: Draft, target: Callable[[int], Row], sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        """Return (accepted nodes from the root on, token that follows them).

        `target(node)` returns the target's output after a node, -1 for the root; it is called only
        for nodes that are needed. `special`: control tokens.
        """
        ...


class Exact:
    """Accepts so that the output is what the target alone would have produced."""

    name = "exact"

    def accept(
        self, draft: Draft, target: Callable[[int], Row], sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        if sampler.params.temperature == 0:
            return agree(draft, lambda node: sampler(*target(node)))
        return accept(draft, lambda node: sampler.distribution(*target(node)), sampler.rng.random)


def agree(draft: Draft, choice: Callable[[int], int]) -> tuple[list[int], int]:
    """See `Rule.accept`. `choice(node)` returns the target's own token after a node."""
    path: list[int] = []
    node = -1
    while True:
        token = choice(node)
        matches = [child for child in draft.children(node) if draft.tokens[child] == token]
        if not matches:
            return path, token
        node = matches[0]
        path.append(node)


def accept(
    draft: Draft, target: Callable[[int], Distribution], uniform: Uniform
) -> tuple[list[int], int]:
    """See `Rule.accept`. `uniform` draws from [0, 1)."""
    path: list[int] = []
    node = -1
    while True:
        p, children = target(node), draft.children(node)
        if all(draft.drawn_from[child] is None for child in children):
            token = p.draw(uniform())
            accepted = next((child for child in children if draft.tokens[child] == token), None)
        else:
            accepted, rest = tried(p, children, draft, uniform)
            token = rest.draw(uniform()) if accepted is None else draft.tokens[accepted]
        if accepted is None:
            return path, token
        node = accepted
        path.append(node)


def tried(
    p: Distribution, siblings: Sequence[int], draft: Draft, uniform: Uniform
) -> tuple[int | None, Distribution]:
    """Return (first accepted sibling or None, what is left of p)."""
    for node in siblings:
        token, q = draft.tokens[node], draft.drawn_from[node]
        ratio = p.of(token) / (1.0 if q is None else q.of(token))
        if ratio >= 1 or (ratio > 0 and uniform() < ratio):
            return node, p
        rest = p.without(token) if q is None else p.minus(q)
        # an empty residual means p and q are equal up to rounding, and so was the rejection
        p = rest if rest.total else p
    return None, p


@dataclass(frozen=True)
class Top:
    """Lossy rule: accepts a drafted token while its rank under the target is at most β.

    Tokens are ranked by their logits after bias and penalty, the lower id first among equals, so
    β = 1 at temperature 0 is the exact rule. Temperature and filters do not affect the rank, only
    the sampling of the token after the last accepted one. The best-ranked sibling is accepted. A
    control token is accepted only as the likeliest: a merely plausible end must not end an answer.
    """

    beta: int

    @property
    def name(self) -> str:
        return f"top-{self.beta}"

    def accept(
        self, draft: Draft, target: Callable[[int], Row], sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        path: list[int] = []
        node = -1
        while siblings := draft.children(node):
            ranked = sampler.likeliest(*target(node), self.beta)
            ranks = {
                token: rank
                for rank, token in enumerate(ranked)
                if rank == 0 or token not in special
            }
            candidates = [child for child in siblings if draft.tokens[child] in ranks]
            if not candidates:
                break
            node = min(candidates, key=lambda child: ranks[draft.tokens[child]])
            path.append(node)
        return path, sampler(*target(node))


EXACT = Exact()


def rule_of(accept: str, field: str = "accept") -> Rule:
    """Return the rule for a name such as `exact` or `top-3`. Raises InputError for `field`."""
    if accept == "exact":
        return EXACT
    number = accept[4:] if isinstance(accept, str) and accept.startswith("top-") else ""
    if number.isascii() and number.isdecimal() and len(number) <= 9 and int(number) >= 1:
        return Top(int(number))
    raise InputError(
        f"{accept!r:.60} is neither exact nor top-N with N of at least 1",
        field=field,
        remedy="exact, or top-3, which is lossy",
    )
