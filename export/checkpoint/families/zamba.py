"""Zamba: Mamba-1 layers with several heads, some of which also read the output of one shared block
of attention and MLP.

Source: transformers 5.23 models/zamba, `ZambaForCausalLM`. A head is a group of channels with its
own dt, B and C, computed from those channels only. So `x_proj` and `dt_proj` are block-diagonal,
with a block per head. The shared block is repeated for every use, and the matrix after it is
multiplied into its MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from edge.config import AttentionConfig, Mamba1Config, MlpConfig
from edge.export.checkpoint.families import jamba
from edge.export.checkpoint.family import (
    Family,
    is_transformers,
    known_only,
    layer_types,
    positions,
    whole,
)
from edge.export.checkpoint.fields import UNSUPPORTED, Fields
from edge.export.checkpoint.layout import Block, Layout, SourceTensor, TensorPlace
from edge.export.checkpoint.state_spaces import mamba1_of, rank_of

NAME = "zamba"
_OWN = {
    "attention_head_dim", "attention_hidden_size", "attn_layer_offset", "attn_layer_period",
    "hidden_mamba_act", "layer_types", "layers_block_type", "mamba_conv_bias", "mamba_d_conv",
    "mamba_d_state", "mamba_dt_rank", "mamba_expand", "mamba_proj_bias", "n_mamba_heads",
    "use_associative_scan",
}  # fmt: skip
KINDS = {"mamba": "mamba", "linear_attention": "mamba", "hybrid": "hybrid"}


def claims(fields: Fields) -> bool:
    return is_transformers(fields, NAME, "ZambaForCausalLM")


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    for name, expected in (("hidden_act", "gelu"), ("hidden_mamba_act", "silu")):
        fields.demand(name, expected)
    hybrid = _hybrid(fields)
    mlp = fields.build(
        MlpConfig, d_intermediate=fields.integer("intermediate_size"), form="geglu", aside=True
    )
    mamba, attention = _mamba(fields), _attention(fields)
    layers: list[Any] = []
    for is_hybrid in hybrid:
        layers += [attention, mlp, mamba] if is_hybrid else [mamba]
    config = whole(fields, NAME, layers, tied=True, context=positions(fields, 4096))
    layout = Layout(config)
    shared = f"model.layers.{hybrid.index(True)}.shared_transf" if True in hybrid else ""
    places = place_blocks(layout, hybrid, lambda layer, _: _place_shared(layout, layer, shared))
    for layer, source in places:
        _place_heads(layout, f"layers.{layer}", source, mamba)
    return layout


def _hybrid(fields: Fields) -> list[bool]:
    """Return which blocks use the shared block."""
    count = fields.blocks()
    if "layer_types" in fields or "layers_block_type" in fields:
        return [kind == "hybrid" for kind in layer_types(fields, count, KINDS, "mamba")]
    period, offset = (
        fields.integer("attn_layer_period", 6), fields.integer("attn_layer_offset", 4, low=0)
    )  # fmt: skip
    return [block == 2 or (block > 2 and (block - 3) % period == offset) for block in range(count)]


def _mamba(fields: Fields) -> Mamba1Config:
    width = fields.integer("hidden_size")
    heads = fields.integer("n_mamba_heads", 2)
    d_inner = fields.scaled("mamba_expand", width, 2)
    if d_inner % heads:
        fields.inconsistent("n_mamba_heads", f"does not divide {d_inner} channels")
        heads = 1
    ranks = heads * rank_of(fields, width, "mamba_dt_rank")
    return mamba1_of(
        fields, width, jamba.MAMBA, d_inner=d_inner, dt_rank=ranks, B_groups=heads, C_groups=heads
    )


def _attention(fields: Fields) -> AttentionConfig:
    heads, width = fields.integer("num_attention_heads"), 2 * fields.integer("hidden_size")
    if "attention_hidden_size" in fields and fields.integer("attention_hidden_size") != width:
        fields.refuse("attention_hidden_size", f"is not {width}", UNSUPPORTED)
    return fields.build(
        AttentionConfig,
        n_heads=heads,
        n_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("attention_head_dim", max(1, width // heads)),
        recalls=True,
    )


def place_blocks(
    layout: Layout, hybrid: list[bool], place_shared: Callable[[int, int], None]
) -> list[tuple[int, str]]:
    """Place Mamba blocks, some of which have a shared block before them, and the ends.

    `place_shared` gets the index of the attention layer, whose MLP is the next layer, and the
    number of earlier uses. Returns each Mamba's layer index and name in the checkpoint.
    """
    width, layer, mixers = layout.config.d_model, 0, []
    for block, is_hybrid in enumerate(hybrid):
        source = f"model.layers.{block}"
        if is_hybrid:
            place_shared(layer, sum(hybrid[:block]))
            linear = SourceTensor(f"{source}.linear.weight", (width, width))
            for kind in layout.kinds(f"layers.{layer + 1}.down_proj"):
                name = f"layers.{layer + 1}.down_proj.{kind}"
                layout.pieces[name] = replace(layout.pieces[name], behind=linear)
            source, layer = f"{source}.mamba_decoder", layer + 2
        mixers.append((layer, f"{source}.mamba"))
        layout.place_layer(layer, norm=f"{source}.input_layernorm", mixer=f"{source}.mamba")
        layer += 1
    layout.place_ends("model.final_layernorm")
    return mixers


def _place_shared(layout: Layout, layer: int, source: str) -> None:
    """Place one use of the shared block: attention is `layer`, the MLP the layer after it."""
    attention = ("input_layernorm", "self_attn")
    layout.place_block(layer, source, attention, ("pre_ff_layernorm", "feed_forward"))
    # scores are divided by the root of half the head size
    layout.multiply(f"layers.{layer}.q_proj", math.sqrt(2))


def _place_heads(layout: Layout, ours: str, theirs: str, mamba: Mamba1Config) -> None:
    heads, inner, states = mamba.C_groups, mamba.d_inner, mamba.d_state
    rank, size = mamba.dt_rank // heads, mamba.d_inner // heads
    for kind in layout.kinds(f"{ours}.in_proj"):  # x and z are interleaved by channel
        name = f"{ours}.in_proj.{kind}"
        interleaved = tuple(range(0, 2 * inner, 2)) + tuple(range(1, 2 * inner, 2))
        layout.pieces[name] = replace(layout.pieces[name], rows=interleaved)
    x_proj = SourceTensor(f"{theirs}.x_proj_weight", (heads, rank + 2 * states, size))
    dt_proj = SourceTensor(f"{theirs}.dt_proj_weight", (heads, size, rank))
    layout.place_blocks(f"{ours}.x_proj.weight", list(_diagonal(x_proj, (rank, states, states))))
    layout.place_blocks(f"{ours}.dt_proj.weight", list(_diagonal(dt_proj, (size,))))
    for name, source_name, shape in (
        ("dt_proj.bias", "dt_proj_bias", (heads, size)),
        ("A_log", "A_log", (heads, size, states)),
        ("D", "D", (heads, size)),
    ):
        own = layout.pieces[f"{ours}.{name}"].shape
        place = TensorPlace(f"{theirs}.{source_name}", shape, own)
        layout.pieces[f"{ours}.{name}"] = place


def _diagonal(source: SourceTensor, parts: tuple[int, ...]) -> Iterator[Block]:
    """Yield the blocks of a block-diagonal matrix, one matrix per head; rows are ordered by part,
    then by head."""
    heads, rows, columns = source.shape
    start = 0
    for part in parts:
        for head in range(heads):
            first = head * rows + start
            at = (heads * start + head * part, head * columns)
            yield Block(source, range(first, first + part), at)
        start += part


FAMILY = Family(NAME, "model_type zamba", claims, read)
