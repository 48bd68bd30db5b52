"""What speculation should gain, by the papers' formula from measured costs.

Leviathan et al., arXiv 2211.17192, theorem 3.8: drafts of K tokens, each of which stands with
probability α whatever stood before it, make decoding quicker by

    (1 - α^(K+1)) / ((1 - α) (K c + 1)),

c being what a step of the drafter costs in steps of the target. The numerator over 1 - α is the
expected tokens of a round (their equation 1). The 1 is the verifying run, which the paper takes to
cost as much as a step; here it is v, measured, so that K c + v is a round in steps.

Trees have no such α: SpecInfer (arXiv 2305.09781) and Mamba Drafters put the tokens measured in its
place, and so does `expected_speedup`. What is left between it and the speed-up measured is what
neither knows of: the runtime's own time, the drafter's reading of the prompt, and noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Branches = tuple[int, ...]
Kind = TypeVar("Kind")  # of rounds that cost the same


def expected_tokens(alpha: float, depth: int) -> float:
    """Of a round with a chain of `depth` tokens: (1 - α^(K+1)) / (1 - α), at α = 1 K + 1."""
    return sum(alpha**place for place in range(depth + 1))


def leviathan_speedup(alpha: float, depth: int, draft: float, verify: float) -> float:
    """(1 - α^(K+1)) / ((1 - α) (K c + v)): `draft` is c and `verify` v, both in steps."""
    return expected_tokens(alpha, depth) / (depth * draft + verify)


def acceptance_rate(tokens: float, depth: int) -> float:
    """The α at which a chain of `depth` ≥ 1 has that many expected tokens, between 0 and 1.

    Not the share of drafted tokens that stood: those after the first refused one were never asked.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if expected_tokens(middle, depth) < tokens:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class Prices:
    """Of rounds of one shape, in steps of the target.

    Attributes:
        draft: the drafter's runs, K c for a chain.
        verify: the target's run, v.
    """

    draft: float
    verify: float


def expected_speedup(
    tokens: int, steps: int, shapes: Mapping[Kind, int], prices: Mapping[Kind, Prices]
) -> float | None:
    """Tokens ÷ what they should have cost in plain steps.

    `tokens`: all that came of the rounds of `shapes`, how many of each kind, and of `steps` plain
    steps.
    With one chain and no plain step it is `leviathan_speedup` at that acceptance. None of nothing.
    """
    spent = float(steps)
    for kind, count in shapes.items():
        price = prices[kind]
        spent += count * (price.draft + price.verify)
    return tokens / spent if spent else None
