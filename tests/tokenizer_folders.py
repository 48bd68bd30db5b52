"""Checkpoints whose tokenizers are in other files than tokenizer.json, trained here."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edge.bundle import TokenizerInfo
from edge.export.checkpoint import open_checkpoint
from edge.export.text_files import tokenizer_info
from edge.text.hf import byte_alphabet
from edge.text.load import make_tokenizer
from edge.text.tokenizer import Tokenizer as Ours
from tests.checkpoints import write_json
from tests.transformers_checkpoints import save_llama

TEXT_FILES = ("tokenizer", "tokenizer_config", "special_tokens_map", "generation_config")


def bare_checkpoint(path: Path) -> Path:
    """Save a checkpoint of 500 tokens without text files."""
    save_llama(path, vocab_size=500, bos_token_id=None, eos_token_id=None)
    for name in TEXT_FILES:
        (path / f"{name}.json").unlink()
    return path


def read(path: Path, given: Path | None = None) -> tuple[TokenizerInfo, Ours]:
    """Return a checkpoint's tokenizer as a bundle would have it."""
    checkpoint = open_checkpoint(path)
    info, files = tokenizer_info(checkpoint, checkpoint.config, given)
    return info, make_tokenizer(info, files[0][0].read_bytes(), "x")


def pieces_of(fast: Tokenizer) -> tuple[dict[str, int], list[list[str]]]:
    model = json.loads(fast.to_str())["model"]
    return model["vocab"], model["merges"]


def tekken_of(fast: Tokenizer, pattern: str, special: list[str], count: int) -> dict[str, Any]:
    """Return the content of a tekken.json with the pieces that a trained tokenizer has."""
    letters, (vocabulary, _) = byte_alphabet(), pieces_of(fast)
    words = [text for text in vocabulary if all(c in letters for c in text)]
    pieces = [bytes(letters[c] for c in text) for text in sorted(words, key=vocabulary.__getitem__)]
    ordered = sorted(pieces, key=lambda piece: len(piece) > 1)  # bytes first, as published
    return {
        "config": {
            "pattern": pattern, "num_vocab_tokens": len(ordered), "version": "v3",
            "default_vocab_size": len(ordered) - 10 + count, "default_num_special_tokens": count,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for i, piece in enumerate(ordered)
        ],
        "special_tokens": [
            {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(special)
        ],
    }  # fmt: skip


def add_vocab_merges(path: Path, fast: Tokenizer, **settings: Any) -> None:
    """Write vocab.json, merges.txt and, with `settings`, tokenizer_config.json."""
    vocabulary, merges = pieces_of(fast)
    write_json(path / "vocab.json", vocabulary)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (path / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")
    if settings:
        write_json(path / "tokenizer_config.json", settings)
