"""Granite 4.0: blocks of Mamba-2 or attention, then a gated MLP, in some models next to experts.

Source: transformers 5.23 models/granitemoehybrid, `GraniteMoeHybridForCausalLM`. Its attention has
no position encoding unless `position_embedding_type` is `rope`. The MLP, shared by all tokens, is
parallel to the experts. Gates are a softmax of the chosen logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge.config import (
    AttentionConfig,
    ExpertsConfig,
    MlpConfig,
    ModelConfig,
)
from edge.export.checkpoint.families import bamba, granite
from edge.export.checkpoint.family import (
    Family,
    attention,
    experts,
    head_dim,
    known_only,
    layer_types,
    rope,
    whole,
)
from edge.export.checkpoint.fields import UNSUPPORTED, Fields
from edge.export.checkpoint.layout import Layout

NAME = "granitemoehybrid"
_OWN = granite.FACTORS | bamba.MAMBA | {
    "attention_bias", "init_method", "layer_types", "layers_block_type", "normalization_function",
    "num_experts_per_tok", "num_local_experts", "position_embedding_type",
    "shared_intermediate_size",
}  # fmt: skip
_KINDS = {
    "mamba": "mamba", "linear_attention": "mamba",
    "attention": "attention", "full_attention": "attention",
}  # fmt: skip


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    fields.demand("hidden_act", "silu")
    fields.demand("normalization_function", "rmsnorm")
    blocks = fields.blocks()
    kinds = layer_types(fields, blocks, _KINDS, "mamba")
    encoding = fields.values.get("position_embedding_type")
    if encoding not in (None, "rope", "nope"):
        fields.refuse("position_embedding_type", "is not rope or nope", UNSUPPORTED)
    attends = [kind == "attention" for kind in kinds]
    return read_blocks(fields, NAME, attends, turned=encoding == "rope")


def read_blocks(
    fields: Fields, family: str, attends: Sequence[bool], *, turned: bool, shared: int = 1024
) -> Layout:
    """Read the layout of Granite 4.0 and its relatives.

    Args:
        attends: whether each block has attention; the others have Mamba-2.
        turned: whether attention rotates q and k.
        shared: default width of the MLP next to experts.
    """
    # a model with only attention may leave Mamba-2's sizes at invalid defaults
    mamba = None if all(attends) else bamba.mamba2(fields)
    attn = _attention(fields, turned)
    routed = _experts(fields)
    mlp = fields.build(
        MlpConfig,
        d_intermediate=fields.integer("shared_intermediate_size", shared),
        parallel=bool(routed),
    )
    layers: list[Any] = []
    for attend in attends:
        layers += [attn if attend else mamba, *routed, mlp]
    context = fields.integer("max_position_embeddings", 2048)
    config = whole(fields, family, layers, eps=1e-6, context=context)
    return granite.multiplied(fields, _place(config, attends))


def _experts(fields: Fields) -> list[ExpertsConfig]:
    """Return the experts of a block; empty if the model is dense."""
    count = fields.integer("num_local_experts", 8, low=0)
    if not count:
        return []
    return [experts(fields, count, fields.integer("intermediate_size"))]


def _attention(fields: Fields, uses_rope: bool) -> AttentionConfig:
    size = head_dim(fields, fields.integer("num_attention_heads", 32))
    bias = fields.boolean("attention_bias", False)
    return attention(fields, size=size, bias=bias, rope=rope(fields, size) if uses_rope else None)


def _place(config: ModelConfig, attends: Sequence[bool]) -> Layout:
    layout = Layout(config, ignored=lambda name: name.endswith("rotary_emb.inv_freq"))
    per_block = len(config.layers) // len(attends)
    for block, attending in enumerate(attends):
        source, first = f"model.layers.{block}", per_block * block
        layout.place_layer(
            first,
            norm=f"{source}.input_layernorm",
            mixer=f"{source}.{'self_attn' if attending else 'mamba'}",
        )
        if per_block == 3:
            place_experts(layout, first + 1, source)
        layout.place_layer(
            first + per_block - 1,
            norm=f"{source}.post_attention_layernorm",
            mixer=f"{source}.shared_mlp",
            rename={"down_proj": "output_linear"},
            joined={"input_linear": ("gate_proj", "up_proj")},
        )
    layout.place_ends("model.norm")
    return layout


def place_experts(layout: Layout, index: int, source: str) -> None:
    ours, theirs = f"layers.{index}", f"{source}.block_sparse_moe"
    layout.place_norm(f"{ours}.norm", f"{source}.post_attention_layernorm")
    layout.place(f"{ours}.router.weight", f"{theirs}.router.layer.weight")
    names = (f"{ours}.gate_proj.weight", f"{ours}.up_proj.weight")
    layout.place_stacked(names, f"{theirs}.input_linear.weight")
    layout.place(f"{ours}.down_proj.weight", f"{theirs}.output_linear.weight")


FAMILY = Family.of_transformers(NAME, "GraniteMoeHybridForCausalLM", read)
