"""Teach the exporter a checkpoint layout that it does not know.

python docs/examples/add_a_family.py

Suppose a trainer of your own saves Mamba models with its own config keys and tensor names. A
family defines which configs it claims, the model they describe, and the place of each tensor.
docs/inside/add-a-family.md explains how to add one permanently, with its tests.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import edge
from edge.config import Mamba1Config, NormConfig
from edge.export.checkpoint import FAMILIES, Family, open_checkpoint
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout
from edge.export.exporter import export_checkpoint
from edge.tensors import tensor_shapes

CONFIG = {"model_type": "house-mamba", "width": 48, "depth": 2, "vocabulary": 256}


def claims(fields: Fields) -> bool:
    return bool(fields.values.get("model_type") == "house-mamba")


def read(fields: Fields) -> Layout:
    """Return the model and the stored name of every tensor in `edge.tensors.tensor_shapes`."""
    width = fields.integer("width")
    mixer = fields.build(Mamba1Config, d_inner=2 * width, d_state=16, d_conv=4, dt_rank=width // 16)
    config = fields.model(
        family="house-mamba",
        vocab_size=fields.integer("vocabulary"),
        d_model=width,
        layers=[mixer] * fields.integer("depth"),
        norm=NormConfig(),
    )
    layout = Layout(config)
    for index in range(len(config.layers)):
        # the mixer's tensors keep their names, except `in_proj`, which the trainer calls `enter`
        block = f"blocks.{index}"
        layout.place_layer(
            index, norm=f"{block}.rms", mixer=f"{block}.ssm", rename={"in_proj": "enter"}
        )
    layout.place_ends(embedding="words.weight", norm_f="last.rms", lm_head="head.weight")
    return layout


HOUSE_MAMBA = Family("house-mamba", "model_type house-mamba", claims, read)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        checkpoint = save_random(Path(name) / "checkpoint")
        opened = open_checkpoint(checkpoint, families=(*FAMILIES, HOUSE_MAMBA))
        print(f"{opened.family}: {len(opened.config.layers)} layers")
        made = export_checkpoint(opened, Path(name) / "bundle", quant="w8")
        print(made.accuracy)
        session = edge.load(made.path).session(seed=1)
        print(repr(session.generate("The robot", max_tokens=16).finish().text))


def save_random(path: Path) -> Path:
    """Write a random checkpoint in the trainer's layout."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    layout = read(Fields(path / "config.json", CONFIG))
    torch.manual_seed(0)
    shapes = tensor_shapes(layout.config)
    tensors = {
        piece.source: torch.randn(piece.source_shape) * (0.5 if len(shapes[name]) == 1 else 0.1)
        for name, piece in layout.pieces.items()
    }
    save_file(tensors, path / "model.safetensors")
    return path


if __name__ == "__main__":
    main()
