"""`tokenizer.json`, the format of Hugging Face's `tokenizers` library.

Two families are supported: byte-level BPE (GPT-NeoX, Llama 3, and most Mamba models) and pieces
that write a space as `▁`, with or without byte fallback (Llama 2, Mistral). Loading refuses others.

Typed text and special tokens: the library can leave special tokens unmatched
(`encode_special_tokens`), but a unigram model, or a BPE model with `ignore_merges`, may still find
their spelling in its vocabulary. In that case the tokenizer is rebuilt with those entries renamed
to strings that nobody can type.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable
from functools import cached_property
from typing import Any

from edge.errors import InputError, TokenizerError
from edge.text.hf_checks import growth
from edge.text.specials import SpecialToken, check_specials
from edge.text.tokenizer import (
    MAX_FILE,
    MAX_HOLES,
    MAX_PIECE,
    Tokenizer,
    unknown_character,
)

SPACE = "\u2581"
BYTE_NAME = re.compile(r"<0x[0-9A-Fa-f]{2}>")
MARKED = re.compile(r"<.+>|\[.+\]", re.DOTALL)  # how models spell control tokens
OTHER = "use a model with another tokenizer"
REMEDY = "export the model again from an intact checkpoint"


class HfTokenizer(Tokenizer):
    """A tokenizer from a `tokenizer.json`.

    Special tokens are the added tokens flagged as special, `bos`, `eos`, `pad`, and all other added
    tokens spelled like control tokens, `<…>` or `[…]`. Answers show only the last kind.
    """

    kind = "tokenizer.json"

    def __init__(
        self,
        data: bytes,
        *,
        file: str = "tokenizer.json",
        bos: int | None = None,
        eos: tuple[int, ...] = (),
        pad: int | None = None,
        add_bos: bool = False,
    ) -> None:
        """Raises TokenizerError when `data` is malformed, too large, or its decoder is no join."""
        if len(data) > MAX_FILE:
            raise TokenizerError(f"has {len(data)} bytes, at most {MAX_FILE} allowed", file=file)
        self._file = file
        self._json = _parse(data, file)
        try:
            self._growth = growth(self._json)
            self._safe_length = self._growth.safe_length
        except ValueError as problem:
            raise TokenizerError(f"is not supported: {problem}", file=file, remedy=OTHER) from None
        self._fast = _build(data.decode("utf-8"), file)
        self.bos, self.eos, self.pad, self.add_bos = bos, eos, pad, add_bos
        self.fingerprint = hashlib.sha256(b"tokenizer.json\0" + data).hexdigest()
        vocabulary: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        self._pieces = _pieces_by_id(vocabulary, file)
        self.vocab_size = len(self._pieces)
        self.unassigned = tuple(i for i, piece in enumerate(self._pieces) if piece is None)
        configured = {token for token in (bos, pad, *eos) if token is not None}
        added = self._fast.get_added_tokens_decoder()
        flagged = {i for i, token in added.items() if token.special} | configured
        specials = flagged | {i for i, token in added.items() if MARKED.fullmatch(token.content)}
        self.specials = tuple(
            SpecialToken(
                self._pieces[i] or "",
                i,
                (added[i].lstrip, added[i].rstrip) if i in added else _STRIPS_NOTHING,
            )
            for i in sorted(specials)
            if i < self.vocab_size and self._pieces[i]
        )
        check_specials(self.specials, file, OTHER)
        to_bytes, self.strips_space = _decoder(self._json.get("decoder"), file)
        self._bytes = [
            b"" if piece is None or i in flagged
            # an added token is its own text, whatever the decoder would turn it into
            else piece.encode() if i in added
            else to_bytes(piece)
            for i, piece in enumerate(self._pieces)
        ]  # fmt: skip
        if not specials <= {i for i, token in added.items() if token.special}:
            self._rebuild()

    def _rebuild(self) -> None:
        """Flag every special token as special and hide its spelling from the vocabulary."""
        data, secret = {**self._json}, secrets.token_hex(32)
        hidden = {special.text: f"{secret}-{special.id}" for special in self.specials}
        # renamed, not left out: the library counts the ids of those that follow
        if added := data.get("added_tokens"):
            data["added_tokens"] = [
                token | {"content": hidden[text], "special": True, "normalized": False}
                if (text := token["content"]) in hidden
                else token
                for token in added
            ]
        data["post_processor"] = None  # it names special tokens, and is not used here
        model = data["model"] = {**data["model"]}
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {hidden.get(text, text): i for text, i in vocabulary.items()}
            model["merges"] = [m for m in model.get("merges", []) if _merged_piece(m) not in hidden]
        else:
            model["vocab"] = [[hidden.get(text, text), score] for text, score in vocabulary]
        unknown = model.get("unk_token")
        if unknown in hidden:
            model["unk_token"] = hidden[unknown]
        self._fast = _build(json.dumps(data, ensure_ascii=False), self._file)
        self._json = data
        self.__dict__.pop("_inner", None)

    @cached_property
    def longest_piece(self) -> int:
        return max(len(value) for value in self._bytes)

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        ids = self._encode(text, first)
        if self.special_ids.isdisjoint(ids):
            return ids
        self._rebuild()
        ids = self._encode(text, first)
        if not self.special_ids.isdisjoint(ids):
            raise unknown_character()
        return ids

    def _encode(self, text: str, first: bool) -> list[int]:
        fast = self._fast if first else self._inner
        try:
            if len(text) > self._safe_length:
                normalizer = fast.normalizer
                self._growth.check(text, normalizer and normalizer.normalize_str)
            ids: list[int] = fast.encode(text, add_special_tokens=False).ids
        except (KeyboardInterrupt, SystemExit, InputError):
            raise
        except BaseException as problem:  # a panic in its Rust code is not an Exception
            raise TokenizerError(
                f"cannot encode a text: {problem}"[:500], file=self._file, remedy=OTHER
            ) from None
        return ids

    @cached_property
    def _inner(self) -> Any:
        """The tokenizer for text that follows other text, if only a first word gets a space."""
        step = self._json.get("pre_tokenizer") or {}
        if _kind(step) != "Metaspace" or step.get("prepend_scheme") != "first":
            return self._fast
        data = self._json | {"pre_tokenizer": step | {"prepend_scheme": "never"}}
        return _build(json.dumps(data, ensure_ascii=False), self._file)

    def token_bytes(self, token: int) -> bytes:
        # called for every token of an answer: an id in range does not pay for another call
        return self._bytes[token if 0 <= token < self.vocab_size else self.check_id(token)]

    def id_to_piece(self, token: int) -> str:
        piece = self._pieces[self.check_id(token)]
        return f"<unassigned {token}>" if piece is None else piece


_STRIPS_NOTHING = (False, False)


def _merged_piece(merge: str | list[str]) -> str:
    return "".join(merge.split(" ", 1) if isinstance(merge, str) else merge)


def _parse(data: bytes, file: str) -> dict[str, Any]:
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:
        raise TokenizerError(f"is not valid JSON: {problem}", file=file, remedy=REMEDY) from None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise TokenizerError("has no model", file=file, field="model", remedy=REMEDY)
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):  # the library may read another value than is checked here
        raise ValueError("a key appears twice")
    return parsed


def _build(text: str, file: str) -> Any:
    from tokenizers import Tokenizer as Fast

    try:
        fast = Fast.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # a panic in its Rust code is not an Exception
        raise TokenizerError(f"is not a tokenizer: {problem}", file=file, remedy=REMEDY) from None
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = True
    return fast


def _pieces_by_id(vocabulary: dict[str, int], file: str) -> list[str | None]:
    """List pieces by id. A hostile file must not cause allocations for ids it does not fill."""
    size = max(vocabulary.values(), default=-1) + 1
    if not vocabulary or size > len(vocabulary) + MAX_HOLES:
        raise TokenizerError(
            f"has {len(vocabulary)} pieces with ids up to {size - 1}",
            file=file,
            field="model.vocab",
            remedy=REMEDY,
        )
    pieces: list[str | None] = [None] * size
    for piece, token in vocabulary.items():
        if len(piece) > MAX_PIECE:
            raise TokenizerError(
                f"token {token} has {len(piece)} characters, at most {MAX_PIECE} allowed",
                file=file,
                field="model.vocab",
                remedy=REMEDY,
            )
        if pieces[token] is not None:  # decoding would not restore the text
            raise TokenizerError(
                f"token {token} is {pieces[token]!r:.40} and {piece!r:.40}",
                file=file,
                field="model.vocab",
                remedy=REMEDY,
            )
        pieces[token] = piece
    return pieces


def _decoder(config: Any, file: str) -> tuple[Callable[[str], bytes], bool]:
    """Return the function from a piece to its bytes, and whether decoding drops a first space."""
    steps = config.get("decoders", []) if _kind(config) == "Sequence" else [config]
    kinds = [_kind(step) for step in steps]
    if kinds == ["ByteLevel"]:
        alphabet = byte_alphabet()

        def from_alphabet(piece: str) -> bytes:
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
            return piece.encode()

        return from_alphabet, False
    space = _space_spelling(steps)
    known = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
    if space is None or not set(kinds) <= known:
        raise TokenizerError(
            f"unknown kind {'+'.join(kinds)}; byte-level and ▁-spaced decoders are supported",
            file=file,
            field="decoder",
            remedy=OTHER,
        )
    fallback = "ByteFallback" in kinds

    def from_spaced(piece: str) -> bytes:
        if fallback and BYTE_NAME.fullmatch(piece):
            return bytes((int(piece[3:5], 16),))
        return piece.replace(space, " ").encode()

    strips = any(
        (_kind(step) == "Strip" and step.get("start", 0) > 0 and step.get("content") == " ")
        or (_kind(step) == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return from_spaced, strips


def _kind(step: Any) -> str:
    return str(step.get("type")) if isinstance(step, dict) else "none"


def _space_spelling(steps: list[Any]) -> str | None:
    """Return the string that stands for a space in pieces, if the decoder replaces nothing else."""
    spelling = None
    for step in steps:
        if _kind(step) == "Metaspace":
            spelling = str(step.get("replacement", SPACE))
        elif _kind(step) == "Replace":
            if step.get("content") != " " or not isinstance(step.get("pattern"), dict):
                return None
            spelling = step["pattern"].get("String")
    return spelling if isinstance(spelling, str) and 0 < len(spelling) <= MAX_PIECE else None


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = {chr(value): value for value in printable}
    others = [value for value in range(256) if value not in set(printable)]
    return stand_ins | {chr(256 + n): value for n, value in enumerate(others)}
