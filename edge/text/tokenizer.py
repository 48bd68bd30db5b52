"""The base class of tokenizers, and the rule that keeps typed text from becoming control tokens.

A prompt has two kinds of text. *Trusted* text comes from the chat template: special tokens written
there become their ids. Everything else is *plain*: whatever a person types, `encode` never yields a
special id, and `decode(encode(text)) == text` if the tokenizer can represent every character.

Decoding joins bytes: every id stands for fixed bytes, the whole is read as UTF-8, and undecodable
bytes become U+FFFD. `StreamDecoder` relies on that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from edge.errors import InputError
from edge.text.specials import SpecialFinder, SpecialToken

MAX_FILE = 64 << 20  # bytes of a tokenizer file
MAX_PIECE = 4096  # characters of one piece; the longest in use have a few hundred
MAX_TEXT = 16 << 20  # characters of one text to encode
MAX_HOLES = 1 << 16  # ids without a piece, below the largest


@dataclass(frozen=True)
class Segment:
    """A part of a prompt: trusted template text, plain text, or known tokens."""

    text: str
    trusted: bool = False
    tokens: tuple[int, ...] | None = None


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        kind: `tokenizer.json`, `sentencepiece` or `bytes`.
        vocab_size: number of ids; the model may have more rows, which are never sampled.
        bos: id that begins a text, or None.
        eos: ids that end an answer.
        pad: id of the padding token, or None.
        add_bos: whether prompts begin with `bos`.
        fingerprint: SHA-256 of the kind and the file.
        specials: special tokens that trusted text may contain.
        unassigned: ids below vocab_size without a piece.
        strips_space: whether `decode` drops one space that `encode` put before the text.
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
        """Encode non-empty plain text, never as a special id. `first`: nothing comes before it."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return an id's bytes, b"" for control tokens. Raises InputError if it is out of range."""

    @abstractmethod
    def id_to_piece(self, token: int) -> str:
        """Return the vocabulary's spelling of an id, for people to read; control tokens too."""

    @property
    @abstractmethod
    def longest_piece(self) -> int:
        """Maximum number of bytes that one id stands for."""

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that plain text never yields."""
        return frozenset(special.id for special in self.specials)

    @cached_property
    def special_finder(self) -> SpecialFinder:
        """Where special tokens are written in a text."""
        return SpecialFinder(self.specials)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encode a text, without `bos`. `special`: trust it, so special tokens in it become ids.

        Raises InputError when it is not a string, has lone surrogates, or exceeds MAX_TEXT.
        """
        return self.encode_segments([Segment(text, trusted=special)])

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Encode a prompt in segments, without `bos`.

        Plain and trusted text between two special tokens is encoded as one stretch, as in training.
        Only special tokens that lie entirely in one trusted segment become ids.
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
        """Yield the text of a segment, and its special tokens as ids if it is trusted."""
        if not segment.trusted:
            yield segment.text
            return
        at = 0
        for begin, end, special in self.special_finder.find(segment.text):
            yield segment.text[at:begin]
            yield special.id
            at = end
        yield segment.text[at:]

    def find_specials(self, text: str) -> list[int]:
        """Return the ids of the special tokens written in a text, in order."""
        parts = self.split(Segment(text, trusted=True))
        return [part for part in parts if isinstance(part, int)]

    def decode(self, ids: Sequence[int], *, continued: bool = False) -> str:
        """Decode ids. `continued`: other text precedes, so a leading space is kept.

        Raises InputError for an id out of range.
        """
        data = b"".join(self.token_bytes(token) for token in ids)
        if self.strips_space and not continued:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def check_id(self, token: int, field: str = "tokens") -> int:
        """Return the id. Raises InputError, which names `field`, unless 0 ≤ id < vocab_size."""
        if not 0 <= token < self.vocab_size:
            raise InputError(
                f"token {token} is not between 0 and {self.vocab_size - 1}", field=field
            )
        return token


def check_text(text: str) -> None:
    """Raise InputError unless `text` is a valid Unicode string of at most MAX_TEXT characters."""
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
    """Return the error for text that a tokenizer could only encode as a special token."""
    return InputError(
        "contains a character that the model's tokenizer cannot encode",
        field="prompt",
        remedy="leave it out",
    )
