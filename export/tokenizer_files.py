"""Find a checkpoint's tokenizer among its files, and bring it into a form that a bundle takes.

A bundle takes tokenizer.json or a SentencePiece model. Other published forms become a
tokenizer.json, and tokens added to a SentencePiece model become part of it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.errors import ExportError
from edge.export.checkpoint import Checkpoint
from edge.export.checkpoint.bpe import Rebuilt
from edge.export.checkpoint.checkpoint import TOKENIZER_FILES, TOKENIZER_MODEL, is_model_file
from edge.export.checkpoint.files import read_file
from edge.export.checkpoint.tekken import TEKKEN, read_tekken
from edge.export.checkpoint.vocab_merges import MERGES, VOCAB, read_vocab_merges
from edge.export.checkpoint.weights import check_pointer
from edge.protobuf import VARINT, put
from edge.text.spm import CONTROL, UNUSED, USER_DEFINED, read_model

CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
AS_BYTES = "bytes"
_BYTES = 2  # wire type of a length-delimited protobuf field
MAX_ADDED = 1 << 16


@dataclass(frozen=True)
class FoundTokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        file: tokenizer.json, or a SentencePiece model.
        original: the file that it was made of, or itself.
        settings: tokenizer_config.json, and what the other files say where it is silent.
    """

    file: Path
    original: Path
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The file's name in a bundle: versioned names such as tokenizer.model.v3 are not kept."""
        return TOKENIZER_MODEL if self.file.name.startswith(TOKENIZER_MODEL) else self.file.name


def find_tokenizer(checkpoint: Checkpoint, files: Mapping[str, Path]) -> FoundTokenizer | None:
    """Return the tokenizer among files by name, in a form that a bundle takes, or None."""
    settings = read_settings(files.get("tokenizer_config.json"))
    special = read_settings(files.get("special_tokens_map.json"))
    model = next((path for path in files.values() if is_model_file(path)), None)
    file = files.get("tokenizer.json") or model
    if file is None:
        made = _rebuild(checkpoint, files)
        if made is None:
            return None
        file = _kept(checkpoint, "tokenizer.json", made.data)
        return FoundTokenizer(file, made.file, {**made.settings, **special, **settings})
    check_pointer(file)
    original, added = file, read_settings(files.get("added_tokens.json"))
    if file is model and (tokens := added_tokens(settings, added)):
        file = with_added_tokens(checkpoint, file, tokens)
    if original is model and "tokenizer_config.json" not in files:
        special = _ends_of(file) | special
    return FoundTokenizer(file, original, special | settings)


def _rebuild(checkpoint: Checkpoint, files: Mapping[str, Path]) -> Rebuilt | None:
    """Return the tokenizer of forms other than tokenizer.json and SentencePiece, or None."""
    if TEKKEN in files:
        return read_tekken(files[TEKKEN])
    if VOCAB in files or MERGES in files:
        return read_vocab_merges(files, checkpoint.source_config.get("model_type"))
    return None


def _ends_of(model: Path) -> dict[str, Any]:
    """Return the control tokens that a SentencePiece model itself names, as settings."""
    try:
        known = read_model(read_file(model)).pieces
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=str(model))
        ids = {"bos_token": processor.bos_id(), "eos_token": processor.eos_id()}
    except (ValueError, RuntimeError, OSError):
        return {}  # `_read_vocabulary` says what is wrong
    return {
        name: known[i].text
        for name, i in ids.items()
        if 0 <= i < len(known) and known[i].kind == CONTROL
    }


def reads_bytes(given: Path | None) -> bool:
    """Return whether a given tokenizer is AS_BYTES, and no file or folder of that name."""
    return given is not None and str(given) == AS_BYTES and not given.exists()


def given_files(path: Path) -> dict[str, Path]:
    """Return name → tokenizer file at a path the user gave; none for AS_BYTES. Raises ExportError
    if none is there.
    """
    if reads_bytes(path):
        return {}
    candidates = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
    names = {*TOKENIZER_FILES} - {CHAT_TEMPLATE, GENERATION}
    files = {p.name: p for p in candidates if p.name in names or is_model_file(p)}
    forms = {"tokenizer.json", TEKKEN, VOCAB, MERGES}
    if forms.isdisjoint(files) and not any(map(is_model_file, files.values())):
        what = (
            "holds no tokenizer.json, vocab.json, tekken.json or .model file"
            if path.exists()
            else "does not exist"
        )
        raise ExportError(
            what,
            file=path,
            field="--tokenizer",
            remedy="give a tokenizer file, its folder, or bytes",
        )
    return files


def read_settings(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = json.loads(read_file(path))
    except (ValueError, RecursionError) as problem:
        raise ExportError(f"cannot be read as JSON: {problem}", file=path) from None
    return values if isinstance(values, dict) else {}


def added_tokens(
    settings: Mapping[str, Any], added: Mapping[str, Any]
) -> dict[int, tuple[str, bool]]:
    """Return the tokens added to a SentencePiece model after training, such as `<|im_end|>`.

    Maps id to text and whether it is a control token, read from `added_tokens_decoder` of
    tokenizer_config.json and from added_tokens.json. Malformed entries are skipped.
    """
    tokens = {i: (text, True) for text, i in added.items() if isinstance(i, int) and text}
    decoder = settings.get("added_tokens_decoder")
    for key, token in decoder.items() if isinstance(decoder, dict) else ():
        text = token.get("content") if isinstance(token, dict) else None
        if isinstance(text, str) and key.isdecimal() and len(key) < 12:
            tokens[int(key)] = (text, token.get("special") is not False)
    return tokens


def with_added_tokens(
    checkpoint: Checkpoint, model: Path, tokens: Mapping[int, tuple[str, bool]]
) -> Path:
    """Append tokens to a SentencePiece model, in a file that lasts as long as `checkpoint`.

    Returns `model` itself when it has all of them already. Raises ExportError when an id is far
    beyond the model's last, or the model cannot be read.
    """
    data = model.read_bytes()
    try:
        pieces = read_model(data).pieces
    except ValueError as problem:
        raise ExportError(f"cannot be read as a tokenizer: {problem}", file=model) from None
    extra = {i: token for i, token in tokens.items() if i >= len(pieces)}
    if not extra:
        return model
    if max(extra) - len(pieces) > MAX_ADDED:
        raise ExportError(
            f"has {len(pieces)} pieces, and token {max(extra)} was added to it", file=model,
            remedy="do the tokenizer's files come from the same model?",
        )  # fmt: skip
    known = {piece.text for piece in pieces}
    out = bytearray(data)
    for i in range(len(pieces), max(extra) + 1):
        text, control = extra.get(i, (f"[unused {i}]", True))
        kind = CONTROL if control else USER_DEFINED
        if i not in extra or text in known:
            text, kind = f"[unused {i}]", UNUSED
        piece = put(1, _BYTES, text.encode()) + put(3, VARINT, kind)
        out += put(1, _BYTES, piece)
        known.add(text)
    return _kept(checkpoint, TOKENIZER_MODEL, bytes(out))


def _kept(checkpoint: Checkpoint, name: str, data: bytes) -> Path:
    """Write a file that lasts as long as `checkpoint`."""
    folder = Path(tempfile.mkdtemp(prefix="edge-tokenizer-"))
    weakref.finalize(checkpoint, shutil.rmtree, folder, ignore_errors=True)
    (folder / name).write_bytes(data)
    return folder / name
