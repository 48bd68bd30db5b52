"""What a drafter is, and what it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.runtime.sampling import Sampler
from edge.runtime.speculate.policy import Policy


class Distribution(NamedTuple):
    """Tokens that can be drawn, and the probability of each; they sum to 1.

    Attributes:
        ids: [n], distinct, in any order.
        probabilities: [n], positive.
    """

    ids: NDArray[np.intp]
    probabilities: NDArray[np.float64]

    def of(self, token: int) -> float:
        """The probability of one token; 0 for one that cannot be drawn."""
        found = np.flatnonzero(self.ids == token)
        return float(self.probabilities[found[0]]) if len(found) else 0.0


@dataclass(frozen=True)
class Draft:
    """A chain of proposed tokens.

    Attributes:
        tokens: in order; none when the drafter has nothing to say.
        drawn_from: the distribution each was drawn from; None for a token that was chosen, not
            drawn, which is the distribution with that token alone.
    """

    tokens: tuple[int, ...]
    drawn_from: tuple[Distribution | None, ...]


NOTHING = Draft((), ())


class Drafter(Protocol):
    """Proposes what may follow. It keeps what it needs between rounds and forgets on its own what
    the target did not accept: every call names all tokens there are.
    """

    @property
    def name(self) -> str: ...

    def propose(
        self, tokens: Sequence[int], pending: int, count: int, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """At most `count` tokens to follow `tokens` and `pending`.

        `sampler`: whose parameters and random numbers to draw with. `recent`: what its repetition
        penalty looks at. Raises EngineError when its model fails: it is then not asked again.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Memory it holds besides its model's weights."""
        ...


@dataclass(frozen=True)
class Drafting:
    """A session's drafter, and who says how many tokens it drafts.

    Attributes:
        window: tokens of a run that the target must be able to take back.
    """

    drafter: Drafter
    policy: Policy
    window: int
