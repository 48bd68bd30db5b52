"""Write a hybrid as a checkpoint folder that `edge export` reads: the teacher's files, plus
mamba_config.json and the new mixers' tensors (`edge.export.checkpoint.families.mamba_in_llama`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from edge.config import MlpConfig
from edge.errors import ExportError
from edge.export import text_files
from edge.export.checkpoint import Checkpoint, find_layout
from edge.export.checkpoint.checkpoint import as_stored
from edge.export.checkpoint.families import mamba_in_llama
from edge.export.checkpoint.fields import Fields, read_json
from edge.export.checkpoint.layout import Layout
from edge.export.distill.folders import replace_folder
from edge.export.distill.student import Student

WEIGHTS = "model.safetensors"


def source_layout(checkpoint: Checkpoint) -> Layout:
    """Return the layout of a checkpoint folder's tensors. Raises ExportError for a bundle."""
    if checkpoint.manifest is not None:
        raise ExportError(
            "is a bundle, not a checkpoint: it has no config.json",
            file=checkpoint.path, remedy="give the checkpoint that it was exported from",
        )  # fmt: skip
    values = checkpoint.source_config
    return find_layout(Fields(checkpoint.path / "config.json", values))[1]


def write_hybrid(
    student: Student, checkpoint: Checkpoint, folder: Path, figures: Mapping[str, Any],
    tokenizer: Path | None = None,
) -> None:  # fmt: skip
    """Write the hybrid to `folder`, replacing an older one, with the teacher's text files or those
    of `tokenizer`.

    Tensors that did not learn are copied bit for bit from the teacher's files; the others are fp32.
    `figures` go into the model card.
    """
    teacher_layout = source_layout(checkpoint)
    layout = mamba_in_llama.replace_attention(teacher_layout, student.replaced, student.make)
    student_tensors = {
        name: tensor.detach() for name, tensor in student.network.canonical_tensors().items()
    }
    tensors = {
        name: tensor.cpu() if student.learned(name) else checkpoint.tensor(name)
        for name, tensor in student_tensors.items()
    }
    mixers = {mamba_in_llama.CONFIG: _mamba_config(student)} if student.replaced else {}
    readme = card(student, checkpoint, figures)
    files = text_files.copied(checkpoint, tokenizer)
    write_folder(folder, layout, tensors, checkpoint.source_config, readme, files, mixers)


def write_checkpoint(
    folder: Path, source: Checkpoint, layout: Layout, tensors: Mapping[str, Tensor], done: str,
    figures: Mapping[str, Any], tokenizer: Path | None = None,
) -> None:  # fmt: skip
    """Write a model of the same form as `source` to `folder`, replacing an older one, with its text
    files or those of `tokenizer`.

    `done` says in the model card what was done to the model.
    """
    file = source.path / mamba_in_llama.CONFIG
    others = {file.name: read_json(file)} if file.is_file() else {}
    readme = model_card(source, f"{source.path.name}, {done}", "", figures)
    files = text_files.copied(source, tokenizer)
    write_folder(folder, layout, tensors, source.source_config, readme, files, others)


def write_folder(
    folder: Path, layout: Layout, tensors: Mapping[str, Tensor], config: Mapping[str, Any],
    readme: str, texts: Mapping[str, bytes], others: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint. `texts` are its text files by name, `others` further JSON files."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        stored = {name: tensor.contiguous() for name, tensor in as_stored(layout, tensors).items()}
        save_file(stored, temporary / WEIGHTS, metadata={"format": "pt"})
        for name, values in {"config.json": config, **(others or {})}.items():
            (temporary / name).write_text(json.dumps(values, indent=2) + "\n")
        for name, data in texts.items():
            (temporary / name).write_bytes(data)
        (temporary / "README.md").write_text(readme, encoding="utf-8")
        replace_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _mamba_config(student: Student) -> dict[str, object]:
    kv_heads = student.attention_config(0).n_kv_heads
    mlp = student.teacher_config.layers_of(MlpConfig)[1]
    return mamba_in_llama.mamba_config(student.network.config, kv_heads, mlp.d_intermediate)


def card(student: Student, checkpoint: Checkpoint, figures: Mapping[str, Any]) -> str:
    """Return the model card: the hybrid's origin, and its distance from the teacher."""
    blocks = len(student.teacher_config.layers) // 2
    count = len(student.replaced)
    kind = "Mamba" if student.makes_mamba1 else "Mamba-2"
    mixers = ", ".join(str(block) for block in student.replaced) or "none"
    description = (
        f"{count} of {blocks} attention layers are {kind} (blocks {mixers}); they were initialised "
        "from the attention in their place and distilled from the teacher by `edge distill` "
        "(The Mamba in the Llama, arXiv 2408.15237). Everything else is the teacher's. The hybrid "
        "knows at most what its teacher knows, and has the same limits."
    )
    return model_card(checkpoint, f"A hybrid of {checkpoint.path.name}", description, figures)


def model_card(source: Checkpoint, title: str, told: str, figures: Mapping[str, Any]) -> str:
    """Return a README.md with the licence of `source` and a table of figures."""
    licence = text_files.licence(source)
    front = ["---", f"license: {licence}", "---", ""] if licence else []
    formatted = {k: f"{v:.5g}" if isinstance(v, float) else str(v) for k, v in figures.items()}
    rows = [f"| {name} | {value} |" for name, value in formatted.items()]
    return "\n".join([*front, f"# {title}", "", told, "", "| | |", "|---|---|", *rows, ""])
