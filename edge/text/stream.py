"""Streamed text: nothing is shown before it is certain, and shown text never changes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from edge.errors import InputError
from edge.text.tokenizer import Tokenizer

MAX_STOPS = 64
MAX_STOP = 1024  # characters of one stop string


class StreamDecoder:
    """Decodes ids one at a time; the joined pieces equal `tokenizer.decode(ids)`.

    Holds back at most the 3 bytes of an unfinished UTF-8 character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        continued: bool = False,
        spelled: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`continued`: other text precedes, so a leading space is kept. `spelled`: control tokens
        to show → the text for each.
        """
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_space and not continued
        self._spelled = spelled

    def feed(self, token: int) -> str:
        """Return the text that this id makes certain, or "". Raises InputError for a wrong id."""
        if token in self._spelled:
            return self._utf8.decode(self._spelled[token].encode())
        data = self._tokenizer.token_bytes(token)
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Return the rest: U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Finds the first of several stop strings in streamed text.

    The first is the one completed first; of those that end at the same place, it is the longest.
    Text is passed on once no stop string can begin in it, and no part of the found one ever is. The
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises InputError for an empty, overlong or non-string stop, or more than MAX_STOPS."""
        self.stops = check_stops(stops)
        self.stopped = False
        self._held = ""
        self._longest = max(map(len, self.stops), default=0)

    def feed(self, text: str) -> str:
        """Return the text that is now certain; "" once `stopped` is set."""
        if self.stopped or not self.stops:
            return "" if self.stopped else text
        self._held += text
        found = [(at + len(stop), at) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found)[1])
        return self._release(self._undecided_start())

    def finish(self) -> str:
        """Return the rest, when the text ends without a stop string."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _undecided_start(self) -> int:
        """Return the start of the held text's longest suffix that is a prefix of a stop string."""
        held = self._held
        for at in range(max(0, len(held) - self._longest + 1), len(held)):
            if any(stop.startswith(held[at:]) for stop in self.stops):
                return at
        return len(held)


def check_stops(stops: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct stop strings. Raises InputError naming `stop`."""
    if isinstance(stops, str):
        stops = (stops,)
    try:
        out = tuple(dict.fromkeys(stops))
    except TypeError:
        raise InputError("must be strings", field="stop") from None
    if len(out) > MAX_STOPS:
        raise InputError(f"{len(out)} stop strings, at most {MAX_STOPS} allowed", field="stop")
    for stop in out:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP:
            raise InputError(
                f"must be strings of 1 to {MAX_STOP} characters, not {stop!r:.40}", field="stop"
            )
    return out
