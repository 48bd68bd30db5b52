"""Write the tokenizer in a GGUF file as the files of a checkpoint.

Byte-level BPE becomes a tokenizer.json. GGUF has the vocabulary and merges, but only a name for the
pre-tokenizer, which splits text into words (`tokenizer.ggml.pre`). A SentencePiece vocabulary
becomes a `.model` again.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edge.errors import CheckpointError, EdgeError
from edge.export.checkpoint.bpe import (
    NAMED,
    WHOLE_WORDS,
    AddedToken,
    bpe_document,
    merged_pair,
)
from edge.export.checkpoint.checkpoint import TOKENIZER_MODEL
from edge.protobuf import VARINT, put

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BYTES, _FIXED32 = 2, 5  # wire types of protocol buffers
_MAX_SCORE = 3.4028234e38
_TOKENIZER_REMEDY = "pass the original checkpoint's tokenizer.json with --tokenizer"
_PADDING = re.compile(r"\[PAD\d+\]")  # pads a vocabulary to the embedding's size in conversions
# tokens that end a message in the families' templates, which GGUF need not name
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>")


class GgufTokenizer:
    """The tokenizer that a file's metadata describe.

    Attributes:
        refused: error that explains why there is no tokenizer, or None.
    """

    def __init__(self, file: Path, metadata: Mapping[str, Any], vocab_size: int) -> None:
        self._file, self._metadata, self._vocab_size = file, metadata, vocab_size
        self.refused: EdgeError | None = None
        self._model_file: tuple[str, bytes] | None = None
        try:
            self._model_file = self._make()
        except CheckpointError as problem:
            self.refused = problem

    def write(self, folder: Path) -> list[Path]:
        """Write the tokenizer, its settings and the chat template; return the files."""
        settings = folder / "tokenizer_config.json"
        text = json.dumps(self._settings(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        settings.write_text(text, "utf-8", newline="\n")
        if self._model_file is None:
            return [settings]
        name, data = self._model_file
        (folder / name).write_bytes(data)
        return [folder / name, settings]

    def generation(self) -> dict[str, Any]:
        """Return `bos_token_id`, `eos_token_ids` and `pad_token_id` where the file names them.

        Raises CheckpointError for an id that is not a token.
        """
        ids: dict[str, Any] = {}
        if (bos := self._token("bos")) is not None:
            ids["bos_token_id"] = bos
        if (pad := self._token("padding")) is not None:
            ids["pad_token_id"] = pad
        ends = [self._token("eos"), self._token("eot"), self._token("eom"), *self._template_ends()]
        if eos := list(dict.fromkeys(token for token in ends if token is not None)):
            ids["eos_token_ids"] = eos
        return ids

    # -- metadata ------------------------------------------------------------------------------

    def _get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def _string(self, name: str) -> str | None:
        """Return a value if it is a string, else None."""
        value = self._get(name)
        return value if isinstance(value, str) else None

    def _refusal(self, name: str, message: str, remedy: str = _TOKENIZER_REMEDY) -> CheckpointError:
        field = f"tokenizer.ggml.{name}"
        return CheckpointError(message, file=self._file, field=field, remedy=remedy)

    def _token(self, which: str) -> int | None:
        token = self._get(f"{which}_token_id")
        if token is None:
            return None
        if not isinstance(token, int) or not 0 <= token < self._vocab_size:
            raise self._refusal(
                f"{which}_token_id", f"is {token!r:.20}, not one of {self._vocab_size} tokens",
                "correct it: gguf-set-metadata",
            )  # fmt: skip
        return token

    def _template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) and template else None

    def _template_ends(self) -> list[int]:
        template, tokens, kinds = self._template(), self._get("tokens"), self._get("token_type")
        if template is None or not isinstance(tokens, list) or not isinstance(kinds, list):
            return []
        ends = {text for text in _END_TOKENS if text in template}
        pairs = zip(tokens, kinds, strict=False)
        return [i for i, (text, kind) in enumerate(pairs) if kind == CONTROL and text in ends]

    def _settings(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json."""
        tokens = self._get("tokens")
        settings: dict[str, Any] = {"add_bos_token": self._adds_bos()}
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"),
                             ("pad", "padding")):  # fmt: skip
            token = self._get(f"{theirs}_token_id")
            if isinstance(token, int) and isinstance(tokens, list) and 0 <= token < len(tokens):
                settings[f"{ours}_token"] = tokens[token]
        if (template := self._template()) is not None:
            settings["chat_template"] = template
        return settings

    def _adds_bos(self) -> bool:
        implied = self._string("model") == "llama" or self._string("pre") in WHOLE_WORDS
        return bool(self._get("add_bos_token", implied))

    def _list(self, name: str, kind: type | tuple[type, ...], count: int | None = None) -> Any:
        values = self._get(name)
        if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
            raise self._refusal(
                name, "is missing" if values is None else "is not a list of the expected type"
            )
        if count is not None and len(values) != count:
            raise self._refusal(name, f"has {len(values)} entries for {count} tokens")
        return values

    # -- the two kinds -------------------------------------------------------------------------

    def _make(self) -> tuple[str, bytes]:
        makers: dict[str, Callable[[list[str], list[int]], tuple[str, bytes]]] = {
            "gpt2": self._make_bpe,
            "llama": self._make_sentencepiece,
        }
        model = self._string("model")
        if model not in makers:
            value = self._get("model")
            raise self._refusal("model", f"is {value!r:.60}; {', '.join(makers)} are known")
        tokens = self._list("tokens", str)
        if len(tokens) > self._vocab_size:
            raise self._refusal(
                "tokens", f"has {len(tokens)} entries, the model {self._vocab_size}"
            )
        kinds = [NORMAL] * len(tokens)
        if self._get("token_type") is not None:
            kinds = self._list("token_type", int, len(tokens))
            for index, kind in enumerate(kinds):
                if not 0 <= kind <= BYTE:
                    raise self._refusal("token_type", f"entry {index} is {kind}, an unknown kind")
        return makers[model](tokens, kinds)

    def _make_bpe(self, tokens: list[str], kinds: list[int]) -> tuple[str, bytes]:
        pre = self._string("pre")
        if pre not in NAMED:
            value = self._get("pre")
            raise self._refusal("pre", f"is {value!r:.60}, an unknown pre-tokenizer")
        vocabulary = {
            text: index
            for index, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
            if not (kind == UNUSED and _PADDING.fullmatch(text))
        }
        added = {
            index: AddedToken(text, special=kinds[index] != USER_DEFINED)
            for text, index in vocabulary.items()
            if kinds[index] in (UNKNOWN, CONTROL, USER_DEFINED)
        }
        data = bpe_document(NAMED[pre], vocabulary, self._merges(vocabulary), added)
        return "tokenizer.json", data

    def _merges(self, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
        merges = []
        for index, merge in enumerate(self._list("merges", str)):
            pair = merged_pair(merge, vocabulary)
            if pair is None:
                raise self._refusal("merges", f"entry {index} joins no tokens: {merge!r:.60}")
            merges.append(pair)
        return merges

    def _make_sentencepiece(self, tokens: list[str], kinds: list[int]) -> tuple[str, bytes]:
        scores = self._list("scores", (int, float), len(tokens))
        for index, score in enumerate(scores):
            if not abs(score) <= _MAX_SCORE:  # true for NaN too
                raise self._refusal("scores", f"entry {index} is {score}, not a 32-bit number")
        data = bytearray()
        for text, score, kind in zip(tokens, scores, kinds, strict=True):
            # pieces must be distinct, but conversions may leave some without text
            piece = put(1, _BYTES, text.encode())
            piece += put(2, _FIXED32, struct.pack("<f", score))
            data += put(1, _BYTES, piece + put(3, VARINT, kind or NORMAL))
        bpe, fallback = put(3, VARINT, 2), put(35, VARINT, int(BYTE in kinds))
        special = [(40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")]
        ids = b"".join(
            put(number, VARINT, token)
            for number, which in special
            if (token := self._token(which)) is not None
        )
        data += put(2, _BYTES, bpe + put(4, VARINT, len(tokens)) + fallback + ids)
        prefix = int(bool(self._get("add_space_prefix", True)))
        trims = int(bool(self._get("remove_extra_whitespaces", False)))
        normalizer = put(1, _BYTES, b"identity") + put(3, VARINT, prefix) + put(4, VARINT, trims)
        data += put(3, _BYTES, normalizer + put(5, VARINT, 1))
        return TOKENIZER_MODEL, bytes(data)
