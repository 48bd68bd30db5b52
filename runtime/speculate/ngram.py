"""Look-up drafting: what followed the last time these tokens were said.

Prompt lookup decoding (Saxena, 2023); LLMA, arXiv 2304.04487. It needs no second model, costs
microseconds, and proposes nothing where nothing repeats; so a drafting model has one beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edge.runtime.sampling import Sampler
from edge.runtime.speculate.draft import NOTHING, Draft, Drafter
from edge.runtime.speculate.policy import NO_OUTLOOK, Outlook
from edge.runtime.speculate.shape import LOOK_UP, Shape

# what a match is found by, the longer first; one token alone is hardly any evidence
_LENGTHS = (4, 2)
_SHORT = _LENGTHS[-1]
# tokens of a match that are counted
_COUNTED = 16


class NgramDrafter(Drafter):
    """Remembers where each run of 2 and of 4 tokens last ended, in the prompt and the answer.

    Attributes:
        restarted: whether the text is another than that of the last outlook, not a longer one.
    """

    name = "ngram"

    def __init__(self, longest: int) -> None:
        """`longest`: the most tokens of a draft."""
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
        # a long run ends in a short one: where that is new, so is the long one
        if tuple(known[-_SHORT:]) in self._ends[_SHORT]:
            for length in _LENGTHS:
                end = self._ends[length].get(tuple(known[-length:]))
                if end is not None:
                    self._outlook = Outlook(self._matched(end, length), self._following(end))
                    break
        return self._outlook

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """See `Drafter.propose`: a chain, whatever the shape, of what `outlook` has found."""
        found = self._outlook.found[: shape.depth]
        return Draft(found, (None,) * len(found))

    def _matched(self, end: int, length: int) -> int:
        """How many tokens before `end` are those that the text ends in, of which `length` are."""
        known = self._tokens
        most = min(_COUNTED, end)
        while length < most and known[end - length - 1] == known[-length - 1]:
            length += 1
        return length

    def _following(self, end: int) -> tuple[int, ...]:
        """What came after `end`. Where the text is over before the draft is, the draft has begun
        there: a text that goes round in a circle is expected to continue so.
        """
        found = self._tokens[end : end + self._longest]
        if (short := self._longest - len(found)) > 0:
            found += (found * (1 + short // len(found)))[:short]
        return tuple(found)

    def _follow(self, tokens: Sequence[int], pending: int) -> None:
        """Take in what is new; begin again when what is known was taken back."""
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
        # a run is entered when a token has followed it: the last one must not find itself
        for length, ends in self._ends.items():
            first, last = max(count, length), len(known)
            if first == last - 1:  # as in every step of an answer
                ends[tuple(known[first - length : first])] = first
            elif first < last:
                runs = (known[first - length + at : last - length + at] for at in range(length))
                ends.update(zip(zip(*runs, strict=True), range(first, last), strict=True))


class CombinedDrafter(Drafter):
    """Drafts by look-up or by the model, as the shape says.

    While it looks up the model falls behind the text. It reads what it has missed when it is asked
    next, in one run: its state is rewound to the text's, as after any draft of its own.
    """

    goes_on = True
    # to read, of a model that has failed: so much that no policy asks it
    _HOPELESS = 1 << 40

    def __init__(self, model: Drafter, look_up: NgramDrafter) -> None:
        self.model = model
        self._look_up = look_up
        self._read = 0  # tokens of this text that the model was asked with last
        self._failed = False  # in this answer

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
        found = self._look_up.outlook(tokens, pending)
        if self._look_up.restarted:
            self._read = 0  # another text: the model may have some of it, which is not asked
        behind = self._HOPELESS if self._failed else len(tokens) + 1 - self._read
        return Outlook(found.matched, found.found, behind)

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        if shape.source == LOOK_UP:
            return self._look_up.propose(tokens, pending, shape, sampler, recent)
        if self._failed:
            return NOTHING
        self._read, self._failed = 0, True  # where it fails, nothing is known
        draft = self.model.propose(tokens, pending, shape, sampler, recent)
        self._read, self._failed = len(tokens) + 1, False
        return draft
