"""The tokenizers' common part, and the rule that keeps typed text from becoming control tokens.

Two kinds of text meet in a prompt. *Trusted* text comes from the chat template: special tokens
written there become their ids. Everything else is *plain*: whatever a person types, `encode` never
yields a special id, and `decode(encode(text)) == text` where the tokenizer can say every character.

Decoding is a join of bytes: every id stands for fixed bytes, the whole is read as UTF-8, and
undecodable bytes become U+FFFD. `StreamDecoder` relies on that.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from edge.errors import InputError

MAX_FILE = 64 << 20  # bytes of a tokenizer file
MAX_PIECE = 4096  # characters of one piece; the longest in use have a few hundred
MAX_TEXT = 16 << 20  # characters of one text to encode
MAX_HOLES = 1 << 16  # ids without a piece, below the largest


@dataclass(frozen=True)
class Segment:
    """A part of a prompt: trusted template text, plain text, or tokens that are already known."""

    text: str
    trusted: bool = False
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SpecialToken:
    """A special token as templates spell it; `strips`: it swallows white space (left, right)."""

    text: str
    id: int
    strips: tuple[bool, bool] = (False, False)


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        kind: `tokenizer.json`, `sentencepiece` or `bytes`.
        vocab_size: ids are below this; the model may have more rows, which are never sampled.
        bos: the id that begins a text, or None. eos: ids that end an answer. pad: or None.
        add_bos: prompts begin with `bos`.
        fingerprint: SHA-256 over the kind and the file.
        specials: the special tokens that trusted text may contain.
        unassigned: ids below vocab_size that stand for nothing.
        strips_space: `decode` drops one space that `encode` put before the text.
    """

    kind: str
    vocab_size: int
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    add_bos: bool = False
    fingerprint: str
    specials: tuple[SpecialToken, ...] = ()
    unassigned: tuple[int, ...] = ()
    strips_space: bool = False

    @abstractmethod
    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        """Ids of non-empty plain text; `first`: nothing comes before it. Never a special id."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for in a text; none for control tokens. InputError out of range"""

    @abstractmethod
    def id_to_piece(self, token: int) -> str:
        """The vocabulary's own spelling of an id, control tokens included, for people to read."""

    @property
    @abstractmethod
    def longest_piece(self) -> int:
        """Most bytes of text that one id can stand for."""

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that plain text never yields."""
        return frozenset(special.id for special in self.specials)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        # longest first, so that a token never hides a longer one that begins with it
        parts = [
            (r"\s*" if special.strips[0] else "")
            + f"(?P<s{special.id}>{re.escape(special.text)})"
            + (r"\s*" if special.strips[1] else "")
            for special in sorted(self.specials, key=lambda s: -len(s.text))
            if special.text
        ]
        return re.compile("|".join(parts)) if parts else None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text, without `bos`. `special`: trust it, special tokens in it become ids.

        Raises InputError: not a string, lone surrogates, or beyond MAX_TEXT characters.
        """
        return self.encode_segments([Segment(text, trusted=special)])

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a prompt in segments, without `bos`.

        Plain and trusted text between two special tokens is encoded as one stretch, as it was in
        training; only special tokens that lie whole in one trusted segment become ids.
        """
        ids: list[int] = []
        run: list[str] = []

        def flush() -> None:
            if text := "".join(run):
                ids.extend(self._encode_plain(text, first=not ids))
            run.clear()

        for segment in segments:
            if segment.tokens is not None:
                flush()
                ids.extend(segment.tokens)
                continue
            check_text(segment.text)
            for part in self.split(segment):
                if isinstance(part, int):
                    flush()
                    ids.append(part)
                else:
                    run.append(part)
        flush()
        return ids

    def split(self, segment: Segment) -> Iterable[str | int]:
        """The text of a segment with its special tokens, if it is trusted, as ids."""
        pattern = self._special_pattern
        if not segment.trusted or pattern is None:
            yield segment.text
            return
        at = 0
        for match in pattern.finditer(segment.text):
            yield segment.text[at : match.start()]
            assert match.lastgroup is not None
            yield int(match.lastgroup[1:])
            at = match.end()
        yield segment.text[at:]

    def find_specials(self, text: str) -> list[int]:
        """The special tokens written in a text, in order."""
        parts = self.split(Segment(text, trusted=True))
        return [part for part in parts if isinstance(part, int)]

    def decode(self, ids: Sequence[int], *, continued: bool = False) -> str:
        """Text of ids. `continued`: other text precedes, so that a leading space is kept.

        Raises InputError for an id out of range.
        """
        data = b"".join(self.token_bytes(token) for token in ids)
        if self.strips_space and not continued:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def check_id(self, token: int) -> int:
        """The id itself, or InputError unless 0 ≤ id < vocab_size."""
        if not 0 <= token < self.vocab_size:
            raise InputError(
                f"token {token} is not between 0 and {self.vocab_size - 1}", field="tokens"
            )
        return token


def check_text(text: str) -> None:
    """Raise InputError unless `text` is a Unicode string of a size that can be encoded."""
    if not isinstance(text, str):
        raise InputError(f"must be a string, not {type(text).__name__}", field="prompt")
    if len(text) > MAX_TEXT:
        raise InputError(
            f"has {len(text)} characters, at most {MAX_TEXT} allowed",
            field="prompt",
            remedy="send a shorter text",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise InputError(
            f"is not valid Unicode at character {problem.start}",
            field="prompt",
            remedy="send UTF-8 text",
        ) from None


def unknown_character() -> InputError:
    """Refusal of text that a tokenizer could only encode as a special token."""
    return InputError(
        "contains a character that the model's tokenizer cannot encode",
        field="prompt",
        remedy="leave it out",
    )
