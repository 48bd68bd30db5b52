"""MambaByte: Mamba-1 over bytes, in two layouts.

The Hub models (JunxiongWang/MambaByte_*) are state-spaces checkpoints with a vocabulary of 256.
The paper's own class, `MambaByteLM` (jxiw/MambaByte at 5e16f78, src/mambabyte/lm.py, model.py), has
LayerNorms with bias and an untied head. Its repository stores only the weights, as a .pt file; its
config.json here has the constructor's arguments and `"model_type": "mambabyte"`. Its loader renames
old spellings (src/utils/torch_utils.py), and so does this one.
"""

from __future__ import annotations

import re

from edge.config import NormConfig
from edge.export.checkpoint import state_spaces
from edge.export.checkpoint.family import Family, is_state_spaces, known_only
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "mambabyte"
BYTES = 256
_OWN = {"d_conv", "d_model", "d_state", "expand", "norm_eps", "num_layers", "rms_norm",
        "tie_embeddings"}  # fmt: skip
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def claims(fields: Fields) -> bool:
    """Claim configs of this type, and Mamba-1 over 256 tokens without a tokenizer."""
    if fields.values.get("model_type") == NAME or _is_own_class(fields):
        return True
    directory = fields.file.parent
    return (
        is_state_spaces(fields)
        and fields.values.get("vocab_size") == BYTES
        and state_spaces.ssm_layer(fields) == "Mamba1"
        and not any((directory / name).exists() for name in TOKENIZERS)
    )


def _is_own_class(fields: Fields) -> bool:
    architectures = fields.values.get("architectures")
    return isinstance(architectures, list) and "MambaByteLM" in architectures


def read(fields: Fields) -> Layout:
    if fields.values.get("vocab_size", BYTES) != BYTES:
        fields.refuse("vocab_size", "is not 256", "a byte-level model has one token per byte")
    return state_spaces.read(fields, NAME) if is_state_spaces(fields) else _read_own(fields)


def _read_own(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    width = fields.integer("d_model", 1792)
    mixer = {k: fields.values[k] for k in ("d_state", "d_conv", "expand") if k in fields}
    count = fields.integer("num_layers", 48, high=4096)
    rms = fields.boolean("rms_norm", False)
    config = fields.model(
        family=NAME,
        vocab_size=BYTES,
        d_model=width,
        layers=[state_spaces.mamba1(Fields(fields.file, mixer, refused=fields.refused), width)]
        * count,
        norm=fields.build(
            NormConfig,
            kind="rmsnorm" if rms else "layernorm",
            eps=fields.epsilon("norm_eps", 1e-5),
        ),
        tie_embeddings=fields.boolean("tie_embeddings", False),
    )
    layout = Layout(config, rename=_modern_name)
    for index in range(count):
        source = f"mambabyte.layers.{index}"
        layout.place_layer(index, norm=f"{source}.norm", mixer=f"{source}.mixer")
    layout.place_ends("mambabyte.final_norm", embedding="mambabyte.token_embedding.weight")
    return layout


def _modern_name(name: str) -> str:
    """Rename old spellings: `module.backbone.embedding.weight` →
    `mambabyte.token_embedding.weight`."""
    name = re.sub(r"^module\.", "", name)
    name = re.sub(r"^backbone\.", "mambabyte.", name)
    name = re.sub(r"^mambabyte\.embedding\.", "mambabyte.token_embedding.", name)
    return re.sub(r"^mambabyte\.norm_f\.", "mambabyte.final_norm.", name)


# first, because its state-spaces layout differs from Mamba's only in the vocabulary
FAMILY = Family(
    NAME, "model_type mambabyte, or state-spaces' with vocab_size 256", claims, read, first=True
)
