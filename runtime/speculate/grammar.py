"""Drafts of a grammar alone: what it leaves no choice about, where there is no other drafter."""

from __future__ import annotations

from collections.abc import Sequence

from edge.runtime.engine import DEFAULT_WINDOW
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.accept import EXACT
from edge.runtime.speculate.decode import Drafting
from edge.runtime.speculate.draft import NOTHING, Draft, Drafter
from edge.runtime.speculate.policy import Fixed
from edge.runtime.speculate.shape import NO_DRAFT, Shape


class NoDrafter(Drafter):
    """Has nothing to say beside the grammar."""

    name = "grammar"
    nbytes = 0

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        return NOTHING


# of a session without a drafter, while a grammar holds its answer
GRAMMAR_ALONE = Drafting(NoDrafter(), Fixed(NO_DRAFT), DEFAULT_WINDOW, EXACT)
