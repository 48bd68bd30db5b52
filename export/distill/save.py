"""Writing a hybrid as a checkpoint folder that `edge export` reads: the teacher's own files, with
mamba_config.json and the new mixers' tensors (`edge.export.checkpoint.families.mamba_in_llama`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from edge.config import AttentionConfig, MlpConfig
from edge.errors import ExportError
from edge.export import text_files
from edge.export.checkpoint import Checkpoint, find_layout
from edge.export.checkpoint.checkpoint import as_stored
from edge.export.checkpoint.families import mamba_in_llama
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout
from edge.export.distill.optimizer import replace_folder
from edge.export.distill.student import Student

WEIGHTS = "model.safetensors"


def teacher_layout(checkpoint: Checkpoint) -> Layout:
    """Where a checkpoint folder keeps the teacher's tensors. Raises ExportError for a bundle."""
    if checkpoint.manifest is not None:
        raise ExportError(
            "is a bundle, which has no config.json to begin with",
            file=checkpoint.path, remedy="give the checkpoint that it was made from",
        )  # fmt: skip
    values = checkpoint.source_config
    return find_layout(Fields(checkpoint.path / "config.json", values))[1]


def write_hybrid(
    student: Student, checkpoint: Checkpoint, folder: Path, figures: Mapping[str, Any]
) -> None:
    """Put the hybrid at `folder`, in place of one that was there.

    What did not learn is copied from the teacher's files as it stands there, bit for bit; what did
    is fp32. `figures` go into the model card.
    """
    whole = teacher_layout(checkpoint)
    layout = mamba_in_llama.replace_attention(whole, student.replaced, student.make)
    found = {name: tensor.detach() for name, tensor in student.network.canonical_tensors().items()}
    tensors = {
        name: tensor.cpu() if student.learned(name) else checkpoint.tensor(name)
        for name, tensor in found.items()
    }
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    stored = {name: tensor.contiguous() for name, tensor in as_stored(layout, tensors).items()}
    save_file(stored, temporary / WEIGHTS, metadata={"format": "pt"})
    _write_json(temporary / "config.json", checkpoint.source_config)
    if student.replaced:
        _write_json(temporary / mamba_in_llama.CONFIG, _mamba_config(student))
    for file in checkpoint.tokenizer_files:
        shutil.copyfile(file, temporary / file.name)
    (temporary / "README.md").write_text(card(student, checkpoint, figures), encoding="utf-8")
    replace_folder(temporary, folder)


def _mamba_config(student: Student) -> dict[str, object]:
    attention, mlp = student.teacher_config.layers[:2]
    assert isinstance(attention, AttentionConfig) and isinstance(mlp, MlpConfig)
    wide = mlp.d_intermediate
    return mamba_in_llama.mamba_config(student.network.config, attention.n_kv_heads, wide)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def card(student: Student, checkpoint: Checkpoint, figures: Mapping[str, Any]) -> str:
    """The model card: where the hybrid comes from, and how far it is from there."""
    licence = text_files.licence(checkpoint)
    front = ["---", f"license: {licence}", "---", ""] if licence else []
    blocks = len(student.teacher_config.layers) // 2
    gone = len(student.replaced)
    kind = "Mamba" if student.makes_mamba1 else "Mamba-2"
    mixers = ", ".join(str(block) for block in student.replaced) or "none"
    lines = [
        *front,
        f"# A hybrid of {checkpoint.path.name}",
        "",
        f"{gone} of {blocks} attention layers are {kind} (blocks {mixers}); they were initialised "
        "from the attention in their place and distilled from the teacher by `edge distill` "
        "(The Mamba in the Llama, arXiv 2408.15237). Everything else is the teacher's.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_shown(value)} |" for name, value in figures.items()),
        "",
        "It knows what its teacher knows, or less, and has the teacher's limits.",
        "",
    ]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
