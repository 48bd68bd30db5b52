"""By which rule drafted tokens stand: the exact one, or MambaByte's, which trades loss for length.

MambaByte (arXiv 2401.13660, section 3 and algorithm 1): a drafted byte stands while it is among the
target's β likeliest. What comes out is then neither the target's own choice nor distributed as its
words. The paper's algorithm keeps the first byte that fails, its text does not: here none that
fails stands (docs/inside/decisions.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from edge.errors import InputError
from edge.runtime.generate import Logits
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.accept import accept, agree
from edge.runtime.speculate.draft import Draft


class Row(NamedTuple):
    """What the target says after a node.

    Attributes:
        logits: [V] of the tokens that may be drawn.
        history: what the repetition penalty looks at.
    """

    logits: Logits
    history: list[int]


class Rule(Protocol):
    """Which drafted tokens stand."""

    @property
    def name(self) -> str:
        """As it is asked for."""
        ...

    def accept(
        self, draft: Draft, target: Callable[[int], Row], sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        """(the nodes that stand, from the root on; the token after them).

        `target(node)`: after a node, -1 the root. `special`: control tokens.
        """
        ...


class Exact:
    """What comes out is what the target alone would have said (`agree`, `accept`)."""

    name = "exact"

    def accept(
        self, draft: Draft, target: Callable[[int], Row], sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        if sampler.params.temperature == 0:
            return agree(draft, lambda node: sampler(*target(node)))
        return accept(draft, lambda node: sampler.distribution(*target(node)), sampler.rng.random)


@dataclass(frozen=True)
class Top:
    """A drafted token stands while its rank under the target is at most β: lossy.

    The rank is that of the logits after bias and penalty, of equal ones the lower id first, so that
    β = 1 at temperature 0 is the exact rule. Temperature and filters do not change it: they say how
    the token after the last that stood is sampled. Of siblings the best ranked stands. A control
    token stands as the likeliest alone: an answer must not end because its end was not unlikely.
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
            found = {token: rank for rank, token in enumerate(ranked, start=1)}
            ranks = [self._rank(draft.tokens[child], found, special) for child in siblings]
            best = min(ranks)
            if best > self.beta:
                break
            node = siblings[ranks.index(best)]
            path.append(node)
        return path, sampler(*target(node))

    def _rank(self, token: int, found: dict[int, int], special: Collection[int]) -> int:
        """From 1 on; β + 1 for a token that cannot stand."""
        rank = found.get(token, self.beta + 1)
        return self.beta + 1 if token in special and rank > 1 else rank


EXACT = Exact()


def rule_of(accept: str, field: str = "accept") -> Rule:
    """`exact`, or `top-3`. Raises InputError for anything else, naming `field`."""
    if accept == "exact":
        return EXACT
    number = accept[4:] if isinstance(accept, str) and accept.startswith("top-") else ""
    if number.isascii() and number.isdecimal() and len(number) <= 9 and int(number) >= 1:
        return Top(int(number))
    raise InputError(
        f"{accept!r:.60} is neither exact nor top-N with an N from 1 on",
        field=field,
        remedy="exact, or top-3, which is lossy",
    )
