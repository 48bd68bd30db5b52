"""Targets and Mamba drafters that agree now and then: tiny random bundles, once per process.

A target and its drafter share embedding and head, and their layers add little to the residual
stream, so the next token depends mostly on the last one, which both see.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import edge
from edge.export.exporter import export_checkpoint
from edge.runtime.context import Logits
from edge.runtime.model import Model
from edge.runtime.session import Session
from edge.runtime.speculate.text_drafter import TextDrafter
from tests import checkpoints, transformers_checkpoints
from tests.session_models import states

_ROOT = tempfile.TemporaryDirectory(prefix="edge-speculation-")
_WIDTH = 32
# the weights through which a layer writes to the residual stream
_LAST = ("attention.dense.weight", "attention.dense.bias", "dense_4h_to_h.weight",
         "dense_4h_to_h.bias", "o_proj.weight", "down_proj.weight", "out_proj.weight")  # fmt: skip
_ROWS = 288  # rows of the targets: more padding than the drafter's 272

SAVE: dict[str, Any] = {
    "gpt_neox": lambda path: transformers_checkpoints.save_gpt_neox(
        path, vocab_size=_ROWS, max_position_embeddings=96
    ),
    "llama": lambda path: transformers_checkpoints.save_llama(path, vocab_size=_ROWS),
    "hybrid": lambda path: transformers_checkpoints.save_bamba(path, vocab_size=_ROWS),
    "mamba": lambda path: transformers_checkpoints.save_mamba(
        path, hidden_size=_WIDTH, tie_word_embeddings=False
    ),
    "drafting hybrid": lambda path: transformers_checkpoints.save_bamba(
        path, max_position_embeddings=40
    ),
}


@cache
def bundle(kind: str, added: tuple[str, ...] = ()) -> Path:
    """Return a bundle of a family; `added`: control tokens at the end of its vocabulary."""
    name = "-".join([kind.replace(" ", "-"), str(len(added))])
    source, out = Path(_ROOT.name) / f"{name}-source", Path(_ROOT.name) / name
    SAVE[kind](source)
    _subdue(source / "model.safetensors")
    # the same tokenizer in other bytes, as if published by two authors
    _rewrite(source / "tokenizer.json", added, indent=None if kind == "mamba" else 1)
    export_checkpoint(source, out, quant="fp32", verify=False, chunk=16)
    return out


def check_same(plain: Session, drafting: Session) -> None:
    """Check that both hold the same tokens, and nearly equal states."""
    assert plain.tokens == drafting.tokens and plain.pending == drafting.pending
    assert plain.messages == drafting.messages
    expected = states(plain)
    for name, values in states(drafting).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-5)


@cache
def model(kind: str, added: tuple[str, ...] = ()) -> Model:
    return edge.load(bundle(kind, added), threads=1)


def _subdue(file: Path) -> None:
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(_LAST):
            tensors[name] *= 0.3
        if name.endswith(("final_layer_norm.bias", "input_layernorm.bias")):
            tensors[name] *= 0.1
    ends = _ends()
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.shape[0] in (_ROWS, checkpoints.VOCABULARY):
            tensors[name] = ends["embed" in name and "out" not in name][: tensor.shape[0]].clone()
    save_file(tensors, file)


@cache
def _ends() -> tuple[Any, Any]:
    """Return (head, embedding), [288, 32]."""
    import torch

    make = torch.Generator().manual_seed(5)
    return torch.randn(_ROWS, _WIDTH, generator=make), torch.randn(_ROWS, _WIDTH, generator=make)


def _rewrite(file: Path, added: tuple[str, ...], indent: int | None) -> None:
    data = json.loads(file.read_text())
    count = len(data["model"]["vocab"])
    for number, text in enumerate(added):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        entry = {"id": count + number, "content": text, "special": True, **flags}
        data["added_tokens"].append(entry)
    file.write_text(json.dumps(data, indent=indent))


def read_lengths(drafter: TextDrafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many tokens the drafter reads each time that it follows the target's text."""
    lengths: list[int] = []
    fed: list[int] = []
    feed, advance = drafter.context.feed, drafter.context.advance

    def watched_feed(tokens: Sequence[int], halted: Callable[[], object]) -> Logits | None:
        fed.append(len(tokens))
        return feed(tokens, halted)

    def watched_advance(tokens: Sequence[int]) -> Logits:
        lengths.append(sum(fed) + len(tokens))
        fed.clear()
        return advance(tokens)

    monkeypatch.setattr(drafter.context, "feed", watched_feed)
    monkeypatch.setattr(drafter.context, "advance", watched_advance)
    return lengths
