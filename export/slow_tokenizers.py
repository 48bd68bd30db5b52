"""SentencePiece models whose vocabulary goes on in other files, as with Mistral's and Llama's kin.

What was added to such a tokenizer later, `<|im_end|>` and its like, stands in tokenizer_config.json
(`added_tokens_decoder`) or added_tokens.json, with ids behind the model's own pieces.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge.errors import ExportError
from edge.export.checkpoint import Checkpoint
from edge.protobuf import VARINT, put
from edge.text.spm import CONTROL, UNUSED, USER_DEFINED, read_model

_BYTES = 2  # a field of a protocol buffer that has a length
MAX_ADDED = 1 << 16


def added_tokens(
    settings: Mapping[str, Any], added: Mapping[str, Any]
) -> dict[int, tuple[str, bool]]:
    """id → text and whether it is a control token, of both files; what is malformed is left out."""
    found = {i: (text, True) for text, i in added.items() if isinstance(i, int) and text}
    decoder = settings.get("added_tokens_decoder")
    for key, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str) and key.isdecimal():
            found[int(key)] = (token["content"], token.get("special") is not False)
    return found


def with_added_tokens(
    checkpoint: Checkpoint, model: Path, tokens: Mapping[int, tuple[str, bool]]
) -> Path:
    """The model with the tokens behind its pieces, in a file that lasts as long as `checkpoint`.

    It is `model` itself where all of them are pieces of it. Raises ExportError for ids far behind
    the model's, and for a model that cannot be read.
    """
    data = model.read_bytes()
    try:
        pieces = read_model(data).pieces
    except ValueError as problem:
        raise ExportError(f"cannot be read as a tokenizer: {problem}", file=model) from None
    behind = {i: token for i, token in tokens.items() if i >= len(pieces)}
    if not behind:
        return model
    if max(behind) - len(pieces) > MAX_ADDED:
        raise ExportError(
            f"has {len(pieces)} pieces, and token {max(behind)} was added to it", file=model,
            remedy="do the tokenizer's files come from the same model?",
        )  # fmt: skip
    known = {piece.text for piece in pieces}
    out = bytearray(data)
    for i in range(len(pieces), max(behind) + 1):
        text, control = behind.get(i, (f"[unused {i}]", True))
        kind = CONTROL if control else USER_DEFINED
        if i not in behind or text in known:
            text, kind = f"[unused {i}]", UNUSED
        piece = put(1, _BYTES, text.encode()) + put(3, VARINT, kind)
        out += put(1, _BYTES, piece)
        known.add(text)
    folder = Path(tempfile.mkdtemp(prefix="edge-tokenizer-"))
    weakref.finalize(checkpoint, shutil.rmtree, folder, ignore_errors=True)
    made = folder / model.name
    made.write_bytes(out)
    return made
