"""Which drafted tokens are accepted, and what comes after them.

By the exact rule what comes out is what the target alone would have said. At temperature 0 a token
is accepted that is the target's own choice. Else by rejection sampling (Fast inference from
Transformers via speculative decoding, arXiv 2211.17192, algorithm 1): a token drawn from q is
accepted with probability min(1, p/q); where it is not, the next token comes from max(p - q, 0),
normalized; when all are, from the target's next distribution. In a tree the next child of the same
node is then tried, that residual being its p (SpecInfer, arXiv 2305.09781, algorithm 2). Children
may be drawn independently, or each from what its earlier siblings left of q (arXiv 2402.14160): all
that matters is that q is what this one was drawn from. What comes out is distributed as p, whatever
q is.

A token that was chosen and not drawn has q = 1: p/q and what p gives it are the same. Where all
children of a node are such, the target draws as without a draft, and a child that is what it drew
is accepted: as often, and by one random number a token. So look-ups leave a seeded answer as it is.

MambaByte's rule (arXiv 2401.13660, section 3 and algorithm 1) trades loss for length: a drafted
byte is accepted while it is among the target's β likeliest. What comes out is then neither the
target's own choice nor distributed as its words. The paper's algorithm keeps the first byte that
fails, its text does not: here none that fails is kept.
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
    """What the target says after a node.

    Attributes:
        logits: [V] of the tokens that may be drawn.
        history: what the penalties look at.
    """

    logits: Logits
    history: list[int]


class Rule(Protocol):
    """Which drafted tokens are accepted."""

    @property
    def name(self) -> str:
        """As it is asked for."""
        ...

    def accept(
        self, draft: Draft, target: Callable[[int], Row], sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        """(the nodes that are accepted, from the root on; the token after them).

        `target(node)`: after a node, -1 the root; it is asked for no more of them than are needed.
        `special`: control tokens.
        """
        ...


class Exact:
    """What comes out is what the target alone would have said."""

    name = "exact"

    def accept(
        self, draft: Draft, target: Callable[[int], Row], sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        if sampler.params.temperature == 0:
            return agree(draft, lambda node: sampler(*target(node)))
        return accept(draft, lambda node: sampler.distribution(*target(node)), sampler.rng.random)


def agree(draft: Draft, choice: Callable[[int], int]) -> tuple[list[int], int]:
    """See `Rule.accept`. `choice(node)`: what the target says itself after a node."""
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
    """(the first of the siblings to be accepted, or None; what is left of p)."""
    for node in siblings:
        token, q = draft.tokens[node], draft.drawn_from[node]
        ratio = p.of(token) / (1.0 if q is None else q.of(token))
        if ratio >= 1 or (ratio > 0 and uniform() < ratio):
            return node, p
        rest = p.without(token) if q is None else p.minus(q)
        # where p and q are equal up to rounding, no token is refused but by rounding
        p = rest if rest.total else p
    return None, p


@dataclass(frozen=True)
class Top:
    """A drafted token is accepted while its rank under the target is at most β: lossy.

    The rank is that of the logits after bias and penalty, of equal ones the lower id first, so that
    β = 1 at temperature 0 is the exact rule. Temperature and filters do not change it: they say how
    the token after the last accepted one is sampled. Of siblings the best ranked is accepted. A
    control token is as the likeliest alone: an answer must not end because its end was not
    unlikely.
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
            known = [child for child in siblings if draft.tokens[child] in ranks]
            if not known:
                break
            node = min(known, key=lambda child: ranks[draft.tokens[child]])
            path.append(node)
        return path, sampler(*target(node))


EXACT = Exact()


def rule_of(accept: str, field: str = "accept") -> Rule:
    """`exact`, or `top-3`. Raises InputError for anything else, naming `field`."""
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
