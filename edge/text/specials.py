"""Special tokens, and where they are written in a text.

A bundle may bring thousands of special tokens, in any spelling. A regular expression of them takes
quadratic time: it tries its alternatives one by one, and skips the white space before a token again
at every position. Here the time grows with the length of the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from edge.errors import TokenizerError

# vocabularies of speech and images have up to 2^16 codes as special tokens
MAX_SPECIALS = 1 << 17
MAX_SPECIAL = 256  # characters of one
MAX_ALL_SPECIALS = 1 << 21  # characters of all
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class SpecialToken:
    """A special token as templates spell it. `strips`: whether it swallows space (left, right)."""

    text: str
    id: int
    strips: tuple[bool, bool] = (False, False)


def check_specials(specials: Sequence[SpecialToken], file: str, remedy: str) -> None:
    """Raise TokenizerError when special tokens are too many or too long."""
    total, longest = 0, 0
    for special in specials:
        total += len(special.text)
        longest = max(longest, len(special.text))
    for count, most, what in (
        (len(specials), MAX_SPECIALS, "special tokens"),
        (longest, MAX_SPECIAL, "characters in one special token"),
        (total, MAX_ALL_SPECIALS, "characters in all special tokens"),
    ):
        if count > most:
            raise TokenizerError(
                f"has {count} {what}, at most {most} allowed", file=file, remedy=remedy
            )


class SpecialFinder:
    """Finds special tokens: the leftmost first, of those at one place the longest.

    A token that strips space on the left begins at the first space before it.
    """

    def __init__(self, specials: Iterable[SpecialToken]) -> None:
        ranked = sorted((s for s in specials if s.text), key=lambda special: -len(special.text))
        self._ranks = {special: rank for rank, special in enumerate(ranked)}
        self._all = _Spellings(ranked)
        self._stripping = _Spellings([special for special in ranked if special.strips[0]])

    def find(self, text: str) -> Iterator[tuple[int, int, SpecialToken]]:
        """Yield (begin, end, token) of the special tokens in a text, from left to right."""
        if self._candidates is None:
            return
        at = space_end = 0
        later: list[tuple[int, SpecialToken]] = []
        while place := self._candidates.search(text, at):
            begin = place.start()
            if begin >= space_end and self._stripping.firsts and text[begin].isspace():
                space_end = _end_of_space(text, begin)
                later = self._stripping_after(text, begin, space_end)
            while later and later[-1][0] < begin:
                later.pop()
            start, special = begin, self._all.at(text, begin)
            if later and begin < space_end and self._precedes(later[-1][1], special):
                start, special = later[-1]
            if special is None:
                at = begin + 1 if self._all.begins_with_space else max(begin + 1, space_end)
                continue
            at = start + len(special.text)
            at = _end_of_space(text, at) if special.strips[1] else at
            yield begin, at, special

    def starts(self, text: str) -> Iterator[int]:
        """Yield each place where a special token of two or more characters begins."""
        if self._all.first is None:
            return
        for place in self._all.first.finditer(text):
            special = self._all.at(text, place.start())
            if special is not None and len(special.text) > 1:
                yield place.start()

    @cached_property
    def _candidates(self) -> re.Pattern[str] | None:
        """Where a match can begin."""
        return _any_of(self._all.firsts, r"\s" if self._stripping.firsts else "")

    def _stripping_after(
        self, text: str, begin: int, space_end: int
    ) -> list[tuple[int, SpecialToken]]:
        """Return tokens, with their places, that can swallow space from `begin` on.

        Each is longer than those at later places, and the last is the longest. At its last place it
        swallows most.
        """
        first = begin if self._stripping.begins_with_space else space_end
        waiting: list[tuple[int, SpecialToken]] = []
        for place in range(space_end, first - 1, -1):
            special = self._stripping.at(text, place)
            last = waiting[-1][1] if waiting else None
            if special is not None and special is not last and self._precedes(special, last):
                waiting.append((place, special))
        return waiting

    def _precedes(self, special: SpecialToken, other: SpecialToken | None) -> bool:
        return other is None or self._ranks[special] <= self._ranks[other]


class _Spellings:
    """Special tokens in the order of their texts, for a binary search."""

    def __init__(self, specials: Sequence[SpecialToken]) -> None:
        self._by_text: dict[str, SpecialToken] = {}
        for special in specials:
            self._by_text.setdefault(special.text, special)
        self._texts = sorted(self._by_text)
        self._longest = max(map(len, self._texts), default=0)
        # for each text, the lengths of others that it begins with
        self._inner: list[tuple[int, ...]] = []
        outer: list[str] = []
        for text in self._texts:
            while outer and not text.startswith(outer[-1]):
                outer.pop()
            self._inner.append(tuple(map(len, outer)))
            outer.append(text)
        self.firsts = {text[0] for text in self._texts}
        self.first = _any_of(self.firsts)
        self.begins_with_space = any(first.isspace() for first in self.firsts)

    def at(self, text: str, place: int) -> SpecialToken | None:
        """Return the longest special token at a place."""
        part = text[place : place + self._longest]
        # any text that `part` begins with also begins the last text that is not behind `part`
        index = bisect_right(self._texts, part) - 1
        if index < 0:
            return None
        nearest = self._texts[index]
        if part.startswith(nearest):
            return self._by_text[nearest]
        lengths = self._inner[index]
        count = bisect_left(lengths, True, key=lambda length: not part.startswith(nearest[:length]))
        return self._by_text[nearest[: lengths[count - 1]]] if count else None


def _any_of(characters: Iterable[str], more: str = "") -> re.Pattern[str] | None:
    members = "".join(map(re.escape, sorted(characters))) + more
    return re.compile(f"[{members}]") if members else None


def _end_of_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at
