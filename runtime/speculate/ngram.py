"""Look-up drafting: proposes what followed the last occurrence of the current tokens.

Prompt lookup decoding (Saxena, 2023); LLMA, arXiv 2304.04487. It needs no second model, costs
microseconds and proposes nothing where nothing repeats, so drafting models are combined with it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edge.runtime.sampling import Sampler
from edge.runtime.speculate.draft import NOTHING, Draft, Drafter
from edge.runtime.speculate.policy import NO_OUTLOOK, Outlook
from edge.runtime.speculate.shape import LOOK_UP, Shape

# n-gram lengths, tried in this order; a single matching token is hardly any evidence
_LENGTHS = (4, 2)
_SHORT = _LENGTHS[-1]
# maximum counted length of a match
_MAX_MATCH = 16


class NgramDrafter(Drafter):
    """Remembers where each n-gram of 2 and of 4 tokens last ended, in the prompt and the answer.

    Attributes:
        restarted: whether the text is not a continuation of that of the last `outlook`.
    """

    name = "ngram"

    def __init__(self, longest: int) -> None:
        """`longest`: maximum number of tokens of a draft."""
        self._longest = longest
        self._tokens: list[int] = []
        self._ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in _LENGTHS}
        self._began = True
        self._outlook = NO_OUTLOOK
        self.restarted = True

    @property
    def nbytes(self) -> int:
        return sum(sys.getsizeof(ends) for ends in self._ends.values())

    def begin(self) -> None:
        self._began = True

    def outlook(self, tokens: Sequence[int], pending: int) -> Outlook:
        self._follow(tokens, pending)
        known = self._tokens
        self._outlook = NO_OUTLOOK
        # a long n-gram ends in a short one; if that is new, so is the long one
        if tuple(known[-_SHORT:]) in self._ends[_SHORT]:
            for length in _LENGTHS:
                end = self._ends[length].get(tuple(known[-length:]))
                if end is not None:
                    self._outlook = Outlook(self._matched(end, length), self._continuation(end))
                    break
        return self._outlook

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """See `Drafter.propose`. Always proposes a chain, which the last `outlook` has found."""
        drafted = self._outlook.found[: shape.depth]
        return Draft(drafted, (None,) * len(drafted))

    def _matched(self, end: int, length: int) -> int:
        """Return how many tokens before `end` equal the end of the text; `length` are known to."""
        known = self._tokens
        limit = min(_MAX_MATCH, end)
        while length < limit and known[end - length - 1] == known[-length - 1]:
            length += 1
        return length

    def _continuation(self, end: int) -> tuple[int, ...]:
        """Return the tokens after `end`, repeated if the text ends before the draft is full: a text
        that loops is expected to keep looping.
        """
        continuation = self._tokens[end : end + self._longest]
        if (missing := self._longest - len(continuation)) > 0:
            continuation += (continuation * (1 + missing // len(continuation)))[:missing]
        return tuple(continuation)

    def _follow(self, tokens: Sequence[int], pending: int) -> None:
        """Add the new tokens; start over if known tokens have changed."""
        known = self._tokens
        self.restarted = self._began and known != [*tokens, pending][: len(known)]
        if self.restarted:
            known.clear()
            for ends in self._ends.values():
                ends.clear()
        self._began = False
        count = len(known)
        known.extend(tokens[count:])
        if count <= len(tokens):
            known.append(pending)
        # an n-gram is entered once a token follows it, so the last one cannot find itself
        for length, ends in self._ends.items():
            first, last = max(count, length), len(known)
            if first == last - 1:  # the usual case: a plain step
                ends[tuple(known[first - length : first])] = first
            elif first < last:
                columns = (known[first - length + at : last - length + at] for at in range(length))
                ends.update(zip(zip(*columns, strict=True), range(first, last), strict=True))


class CombinedDrafter(Drafter):
    """Drafts by look-up or with the model, depending on the shape's source.

    During look-ups the model falls behind the text. On its next draft it rewinds its state as after
    any draft and reads the missed tokens in one run.
    """

    goes_on = True
    # `behind` of a model that has failed, so high that no policy chooses the model
    _HOPELESS = 1 << 40

    def __init__(self, model: Drafter, look_up: NgramDrafter) -> None:
        self.model = model
        self._look_up = look_up
        self._read = 0  # number of tokens at the model's last draft
        self._failed = False  # whether the model has failed in this answer

    @property
    def name(self) -> str:
        return f"{self.model.name} and {self._look_up.name}"

    @property
    def nbytes(self) -> int:
        return self.model.nbytes + self._look_up.nbytes

    def begin(self) -> None:
        self.model.begin()
        self._look_up.begin()
        self._failed = False

    def outlook(self, tokens: Sequence[int], pending: int) -> Outlook:
        look_up = self._look_up.outlook(tokens, pending)
        if self._look_up.restarted:
            self._read = 0  # for a new text, assume that the model has read none of it
        behind = self._HOPELESS if self._failed else len(tokens) + 1 - self._read
        return Outlook(look_up.matched, look_up.found, behind)

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        if shape.source == LOOK_UP:
            return self._look_up.propose(tokens, pending, shape, sampler, recent)
        if self._failed:
            return NOTHING
        self._read, self._failed = 0, True  # holds if `propose` raises
        draft = self.model.propose(tokens, pending, shape, sampler, recent)
        self._read, self._failed = len(tokens) + 1, False
        return draft
