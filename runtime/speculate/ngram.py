"""Look-up drafting: what followed the last time these tokens were said.

Prompt lookup decoding (Saxena, 2023); LLMA, arXiv 2304.04487. It needs no second model, costs
microseconds, and proposes nothing where nothing repeats.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edge.runtime.sampling import Sampler
from edge.runtime.speculate.draft import NOTHING, Draft
from edge.runtime.speculate.shape import Shape

# a longer context that matches is better evidence; one token alone is hardly any
_LENGTHS = (4, 3, 2)


class NgramDrafter:
    """Remembers where each run of 2, 3 and 4 tokens last ended, in the prompt and the answer."""

    name = "ngram"

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in _LENGTHS}
        self._began = True

    @property
    def nbytes(self) -> int:
        return sum(sys.getsizeof(ends) for ends in self._ends.values())

    def begin(self) -> None:
        """See `Drafter.begin`."""
        self._began = True

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """See `Drafter.propose`: a chain, whatever the shape."""
        self._follow(tokens, pending)
        known = self._tokens
        for length in _LENGTHS:
            end = self._ends[length].get(tuple(known[-length:]))
            if end is not None:
                found = tuple(known[end : end + shape.depth])
                return Draft(found, (None,) * len(found))
        return NOTHING

    def _follow(self, tokens: Sequence[int], pending: int) -> None:
        """Take in what is new; begin again when what is known was taken back."""
        known = self._tokens
        if self._began and known != [*tokens, pending][: len(known)]:
            known.clear()
            for ends in self._ends.values():
                ends.clear()
        self._began = False
        count = len(known)
        known.extend(tokens[count:])
        if count <= len(tokens):
            known.append(pending)
        # a run is entered when a token has followed it: the last one must not find itself
        for end in range(max(count, 1), len(known)):
            for length, ends in self._ends.items():
                if length <= end:
                    ends[tuple(known[end - length : end])] = end
