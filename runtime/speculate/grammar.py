"""Drafting from a grammar's forced tokens, for sessions without another drafter."""

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
    """Drafts nothing beyond the grammar's forced tokens."""

    name = "grammar"
    nbytes = 0

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        return NOTHING


# for a session without a drafter whose answer has a grammar
GRAMMAR_ALONE = Drafting(NoDrafter(), Fixed(NO_DRAFT), DEFAULT_WINDOW, EXACT)
