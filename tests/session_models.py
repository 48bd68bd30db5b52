"""Tiny random bundles through the real exporter, loaded by the real engine, once per process."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np

import edge
from edge.runtime.model import Model
from edge.runtime.session import Session
from tests.text_samples import spm_model

CHAT = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
BYTES_CHAT = (
    "{%- for message in messages -%}"
    "{{ message['role'] | capitalize + ': ' + message['content'] + '\n\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}Assistant:{%- endif -%}"
)
END = 6  # <|end|> in the SentencePiece model
ROOT = tempfile.TemporaryDirectory(prefix="edge-sessions-")


@cache
def bundle(kind: str) -> Path:
    """Return a bundle: chat (Mamba-2) and hybrid (with attention, 64 positions), both with a
    SentencePiece model and padding rows; bytes with a template; base: Mamba without a template,
    byte-level BPE.
    """
    # imported late: torch takes seconds, and processes that are given a bundle need none of it
    from edge.export.exporter import export_checkpoint
    from tests.state_spaces_checkpoints import save_mambabyte
    from tests.transformers_checkpoints import save_bamba, save_mamba, save_mamba2

    source, out = Path(ROOT.name) / f"{kind}-source", Path(ROOT.name) / kind
    if kind == "base":
        save_mamba(source)
    elif kind == "bytes":
        save_mambabyte(source)
        (source / "chat_template.jinja").write_text(BYTES_CHAT)
    elif kind == "chat":
        save_mamba2(source, vocab_size=400)
        _sentencepiece(source)
    else:
        save_bamba(source, vocab_size=400, max_position_embeddings=64)
        _sentencepiece(source)
    export_checkpoint(source, out, quant="fp32", verify=False, chunk=16)
    return out


@cache
def model(kind: str) -> Model:
    return edge.load(bundle(kind), threads=1)


def states(session: Session) -> dict[str, np.ndarray]:
    """Return a session's state, by name, batch first."""
    mark = session.snapshot().context.state
    state = session.model.engine.new_state(window=max(1, mark.pending), capacity=session.capacity)
    state.restore(mark)
    assert state.position == session.position
    return state.arrays()


def same_bits(one: Session, other: Session) -> None:
    """Check that two sessions consumed the same tokens and have bit-identical states."""
    theirs = states(other)
    for name, array in states(one).items():
        assert array.tobytes() == theirs[name].tobytes(), name
    assert (one.position, one.pending) == (other.position, other.pending)


def _sentencepiece(folder: Path) -> None:
    from tests.checkpoints import write_json

    for old in ("tokenizer.json", "special_tokens_map.json"):
        (folder / old).unlink()
    (folder / "tokenizer.model").write_bytes(spm_model())
    (folder / "chat_template.jinja").write_text(CHAT)
    settings = {"eos_token": "<|end|>", "bos_token": "<s>", "add_bos_token": False}
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "generation_config.json", {"eos_token_id": END, "bos_token_id": 1})
