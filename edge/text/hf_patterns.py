"""Checks of a `tokenizer.json`'s regular expressions, before Hugging Face's library runs them.

The library searches with Oniguruma, which backtracks. Tokenizer patterns are alternatives of
characters, classes and their repeats, without repeated groups. Only that form is accepted, so that
no pattern takes exponential time.

Consecutive repeats that can match the same text still multiply: `a*a*b` tries every place where
the first may end. `MAX_WAYS` bounds the number of ways in which the part before a mandatory item
can match. It admits one unbounded repeat there, so the time of a search grows at most with the
square of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import NamedTuple

MAX_PATTERN = 4096  # characters
MAX_REPEAT = 64  # largest bound of a repeat
MAX_DEPTH = 16  # of nested groups
MAX_ITEMS = 256  # per alternative
ENDLESS = 1 << 12  # ways that an unbounded repeat counts as
MAX_WAYS = ENDLESS << 4

_GROUP = re.compile(r"\((?:\?(?:[im]*(?:-[im]+)?[:)]|=|!))?")
_NAMED_CLASS = re.compile(r"\[:\^?[a-z]{1,10}:\]")
_REPEAT = re.compile(r"[*+?][+?]?|\{([0-9]{0,9})(,?)([0-9]{0,9})\}[+?]?")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?\w+\}|x\{[0-9A-Fa-f]{1,6}\}|x[0-9A-Fa-f]{2}|[1-9kgKXRG]|.)", re.S
)
_CODE = re.compile(r"\\x\{?([0-9A-Fa-f]{1,6})")
_EMPTY = ("^", "$", r"\b", r"\B", r"\A", r"\z", r"\Z")  # they match no character


class Item(NamedTuple):
    """A character, class or group of an alternative, with its repeat.

    Attributes:
        chars: sample characters that it can match.
        empty: whether it can match the empty string.
        fails: whether it can fail to match.
        ways: maximum number of ways in which it can match one text.
    """

    chars: frozenset[str]
    empty: bool
    fails: bool
    ways: int


Alternatives = list[list[Item]]


def check_pattern(pattern: str) -> None:
    """Raise ValueError unless a regular expression has a tokenizer's form and bounded cost.

    The time of a search may grow at most with the square of the text.
    """
    if not 1 <= len(pattern) <= MAX_PATTERN:
        raise ValueError(f"pattern: is not an expression of 1 to {MAX_PATTERN} characters")
    for items in _Reader(pattern).read():
        _check_ways(items)


def _check_ways(items: list[Item]) -> None:
    """Raise ValueError if the items up to the last mandatory one can match in too many ways."""
    last = max((at for at, item in enumerate(items) if item.fails), default=0)
    ways: list[int] = []  # ways of the items up to here that can match the same text
    for at, item in enumerate(items[: last + 1]):
        earlier_ways, shared = 1, item.chars
        for earlier in reversed(range(at)):
            if not shared:
                break
            if shared & items[earlier].chars:
                earlier_ways = max(earlier_ways, ways[earlier])
            if not items[earlier].empty:
                shared &= items[earlier].chars
        ways.append(earlier_ways * item.ways)
        if ways[-1] > MAX_WAYS:
            raise ValueError("pattern: repeats that can match the same text follow one another")


class _Reader:
    """Reads a pattern into alternatives of items."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        codes = (int(code, 16) for code in _CODE.findall(pattern))
        self._samples = _samples() + pattern + "".join(
            chr(code) for code in codes if code < 0x110000 and not 0xD800 <= code < 0xE000
        )  # fmt: skip
        self._matched: dict[str, frozenset[str]] = {}

    def read(self) -> Alternatives:
        alternatives = self._alternatives(0)
        if self._at < len(self._pattern):
            raise ValueError(f"pattern: closes a group that is not open at {self._at}")
        return alternatives

    def _alternatives(self, depth: int) -> Alternatives:
        """Read up to the end of the pattern, or the bracket that closes the group."""
        if depth > MAX_DEPTH:
            raise ValueError(f"pattern: more than {MAX_DEPTH} nested groups")
        alternatives: Alternatives = [[]]
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            if self._pattern[self._at] == "|":
                self._at += 1
                alternatives.append([])
                continue
            alternatives[-1] += self._items(depth)
            if len(alternatives[-1]) > MAX_ITEMS:
                raise ValueError(f"pattern: an alternative of more than {MAX_ITEMS} parts")
        return alternatives

    def _items(self, depth: int) -> Iterator[Item]:
        """Yield the next character, class or group, and its repeat as a separate item."""
        at = self._at
        if _REPEAT.match(self._pattern, at):
            raise ValueError(f"pattern: repeats nothing, or a repeat, at {at}")
        group = self._pattern[at] == "("
        item = self._group(depth) if group else self._character()
        repeat = _REPEAT.match(self._pattern, self._at)
        if repeat is None:
            yield item
            return
        if group and repeat[0] != "?":
            raise ValueError(f"pattern: repeats a group at {self._at}")
        minimum, maximum = _bounds(repeat)
        if maximum is not None and maximum > MAX_REPEAT:
            raise ValueError(f"pattern: repeats more than {MAX_REPEAT} times at {self._at}")
        self._at = repeat.end()
        if minimum:
            yield item
        if maximum is None:
            yield Item(item.chars, True, False, ENDLESS)
        elif maximum > minimum:
            yield Item(item.chars, True, False, (maximum - minimum) * item.ways + 1)

    def _group(self, depth: int) -> Item:
        opening = _GROUP.match(self._pattern, self._at)
        assert opening is not None
        if self._pattern.startswith("(?", self._at) and len(opening[0]) < 3:
            raise ValueError(f"pattern: a group of an unknown kind at {self._at}")
        self._at = opening.end()
        if opening[0].endswith(")"):  # flags from here on
            return Item(frozenset(), True, False, 1)
        inner = self._alternatives(depth + 1)
        if self._at == len(self._pattern):
            raise ValueError("pattern: an unterminated group")
        self._at += 1
        for items in inner:
            _check_ways(items)
        is_lookahead = opening[0] in ("(?=", "(?!")
        return Item(
            frozenset().union(*(item.chars for items in inner for item in items)),
            is_lookahead or any(all(item.empty for item in items) for items in inner),
            is_lookahead or all(any(item.fails for item in items) for items in inner),
            sum(prod(item.ways for item in items) for items in inner),
        )

    def _character(self) -> Item:
        begin, self._at = self._at, _element_end(self._pattern, self._at)
        text = self._pattern[begin : self._at]
        if text in _EMPTY:
            return Item(frozenset(), True, True, 1)
        if text not in self._matched:
            self._matched[text] = _matched(text, self._samples)
        return Item(self._matched[text], False, True, 1)


def _matched(element: str, samples: str) -> frozenset[str]:
    """Return the samples that a character or class matches under any flags, or all if none."""
    from tokenizers import Regex, normalizers

    try:
        rest = normalizers.Replace(Regex(f"(?im:{element})"), "").normalize_str(samples)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # a panic in its Rust code is not an Exception
        raise ValueError(f"pattern: {element!r:.40} is not accepted: {problem!s:.80}") from None
    return frozenset(samples).difference(rest) or frozenset(samples)


@cache
def _samples() -> str:
    """Return characters of all kinds, Latin ones first."""
    planes = (*range(0x100), *range(0x100, 0xD800, 61), *range(0xE000, 0x30000, 251))
    return "".join(map(chr, planes))


def _bounds(repeat: re.Match[str]) -> tuple[int, int | None]:
    """Return the (minimum, maximum) count of a repeat; the maximum is None if unbounded."""
    if repeat[1] is None:
        return int(repeat[0][0] == "+"), 1 if repeat[0][0] == "?" else None
    last = repeat[3] if repeat[2] else repeat[1]
    return int(repeat[1] or 0), int(last) if last else None


def _element_end(pattern: str, at: int) -> int:
    """Return where the character, escape or class that begins at `at` ends."""
    if pattern[at] == "\\":
        escape = _ESCAPE.match(pattern, at)
        if escape is None or escape[0][1:2] in "123456789kgKXRG":
            raise ValueError(f"pattern: an escape of an unknown kind at {at}")
        return escape.end()
    if pattern[at] != "[":
        return at + 1
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif depth and pattern.startswith("[:", at):
            # without a name, Oniguruma takes the bracket as a literal or as a nested class
            if not (named := _NAMED_CLASS.match(pattern, at)):
                raise ValueError(f"pattern: a class of an unknown name at {at}")
            at = named.end() - 1
        elif pattern[at] == "[":
            depth += 1
            if pattern[at + 1 : at + 2] == "^":
                at += 1
            if pattern[at + 1 : at + 2] == "]":  # a first bracket in a class is a literal
                at += 1
        elif pattern[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    raise ValueError("pattern: an unterminated class")
