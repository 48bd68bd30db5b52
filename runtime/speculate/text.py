"""Tokens as text: the common ground of two models with different tokenizers.

Text is kept as bytes, in which every token is a piece of known length.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge.errors import InputError
from edge.runtime.context import common_prefix
from edge.text.tokenizer import Segment, Tokenizer

_PRINTABLE = "".join(map(chr, range(33, 127))) + " a  b\nc"
_LONGEST_CHARACTER = 4


class Transcript:
    """The bytes of a token list that grows and is cut.

    Control tokens have the bytes `control`, which are left out at the start of the text.

    Attributes:
        tokens: token ids.
        ends: end of each token's bytes in `data`.
        data: all bytes, without the space that a tokenizer puts before a text.
    """

    def __init__(self, tokenizer: Tokenizer, control: bytes = b"") -> None:
        self.tokens: list[int] = []
        self.ends: list[int] = []
        self.data = bytearray()
        self._tokenizer = tokenizer
        self._control = control

    def append(self, token: int) -> None:
        piece = self._tokenizer.token_bytes(token)
        if not self.data and piece and self._tokenizer.strips_space and self._silent():
            piece = piece.removeprefix(b" ")
        elif self.data and not piece:
            piece = self._control
        self.data += piece
        self.tokens.append(token)
        self.ends.append(len(self.data))

    def _silent(self) -> bool:
        """Return whether no token so far has text, not even the space that was dropped."""
        return not any(map(self._tokenizer.token_bytes, self.tokens))

    def cut(self, count: int) -> None:
        """Drop all but the first `count` tokens."""
        del self.tokens[count:], self.ends[count:]
        del self.data[self.end(count) :]

    def end(self, count: int) -> int:
        """Return the number of bytes of the first `count` tokens."""
        return self.ends[count - 1] if count else 0

    def follow(self, tokens: Sequence[int], known: int = 0) -> int:
        """Replace everything after the first `known` tokens by `tokens`.

        Returns the number of leading bytes that stayed.
        """
        current = self.tokens[known:]
        kept = common_prefix(current, tokens)
        self.cut(known + kept)
        unchanged = len(self.data)
        for token in tokens[kept:]:
            self.append(token)
        return unchanged

    def tokens_within(self, size: int) -> int:
        """Return the number of tokens, with text or without, that end within `size` bytes."""
        return bisect_right(self.ends, size)


def agreement(a: bytearray, b: bytearray, known: int) -> int:
    """Return the length of the common prefix, of which `known` bytes are known to agree."""
    shorter = min(len(a), len(b))
    at = min(known, shorter)
    while at < shorter and a[at] == b[at]:
        at += 1
    return at


def whole_characters(data: bytes | bytearray) -> int:
    """Return the number of bytes without an incomplete UTF-8 character at the end."""
    for back in range(1, min(_LONGEST_CHARACTER, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # first byte of the last character
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back else len(data)
    return len(data)


def begins_character(data: bytearray, at: int) -> bool:
    return at >= len(data) or data[at] & 0xC0 != 0x80


def begins_word(data: bytearray, at: int) -> bool:
    """Return whether `at` is the start or precedes white space: tokens seldom span such places."""
    return at == 0 or (at < len(data) and data[at] in b" \n\t\r")


class Pieces:
    """The bytes of all tokens, sorted to find the tokens that can continue a partial text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pairs = ((tokenizer.token_bytes(token), token) for token in range(tokenizer.vocab_size))
        ordered = sorted((piece, token) for piece, token in pairs if piece)
        self._pieces = [piece for piece, _ in ordered]
        self._tokens = np.array([token for _, token in ordered], np.intp)

    def along(self, text: bytes) -> NDArray[np.intp]:
        """Return the tokens that begin with `text`, else the longest tokens that `text` begins
        with, as a tokenizer that merges greedily would choose.
        """
        pieces = self._pieces
        # UTF-8 never contains this byte, and no piece has 64 of them
        tokens = self._tokens[bisect_left(pieces, text) : bisect_left(pieces, text + b"\xff" * 64)]
        size = len(text)
        while not tokens.size and size > 1:
            size -= 1
            prefix = text[:size]
            tokens = self._tokens[bisect_left(pieces, prefix) : bisect_right(pieces, prefix)]
        return tokens


def spelled(tokenizer: Tokenizer, text: str, before: int | None) -> list[int] | None:
    """Return tokens that spell exactly this text after the token `before` (None: at the start).

    Returns None if the tokenizer lacks a character or alters the text.
    """
    expected = text.encode()
    # some tokenizers put a space before any text: also try without the leading one
    for candidate in (text, text[1:]) if text.startswith(" ") else (text,):
        try:
            if before is None:
                ids = tokenizer.encode(candidate)
            else:
                parts = [Segment("", tokens=(before,)), Segment(candidate)]
                ids = tokenizer.encode_segments(parts)[1:]
        except InputError:
            continue
        data = b"".join(map(tokenizer.token_bytes, ids))
        if before is None and tokenizer.strips_space:
            data = data.removeprefix(b" ")
        if data == expected:
            return ids
    return None


def writes_text(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer encodes all of printable ASCII and preserves white space."""
    return spelled(tokenizer, _PRINTABLE, None) is not None
