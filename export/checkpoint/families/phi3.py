"""Phi-3, Phi-3.5 and Phi-4-mini: Llama's blocks, with q, k and v fused, and gate and up fused.

Source: transformers 5.23 models/phi3, `Phi3ForCausalLM`. LongRoPE has one set of factors for texts
of up to `original_max_position_embeddings`, and another for all positions of a longer text. Keys in
a KV cache are already rotated, so only the first set is used, which limits the context to its
range.
"""

from __future__ import annotations

from edge.config import MlpConfig
from edge.export.checkpoint.family import (
    Family,
    attention,
    head_size,
    known_only,
    positions,
    rope,
    rope_magnitude,
    same_windows,
    whole,
)
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "phi3"
_OWN = {
    "embd_pdrop", "head_dim", "original_max_position_embeddings", "partial_rotary_factor",
    "resid_pdrop", "sliding_window",
}  # fmt: skip
# former names of LongRoPE
_OLD_LONGROPE = ("su", "yarn")
# in published configs, but read by no class
_IGNORED = {"full_attn_mod", "interpolate_factor"}


def read(fields: Fields) -> Layout:
    """Return the layout. Raises CheckpointError for a bad field."""
    known_only(fields, _OWN | _IGNORED)
    fields.demand("hidden_act", "silu")
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.values.get(name)
        if (
            isinstance(scaling, dict)
            and scaling.get("rope_type", scaling.get("type")) in _OLD_LONGROPE
        ):
            fields.values[name] = scaling | {"rope_type": "longrope"}
    context = positions(fields, 4096)
    size = head_size(fields)
    share = fields.number("partial_rotary_factor", 1.0)
    rotation = rope(fields, size, share=share, kinds=("default", "longrope"))
    attn = attention(fields, size=size, rope=rotation)
    mlp = fields.build(MlpConfig, d_intermediate=fields.integer("intermediate_size"))
    blocks = fields.blocks()
    sliding = same_windows(fields, context) or [None] * blocks
    layers = [
        layer for window in sliding for layer in (attn.model_copy(update={"window": window}), mlp)
    ]
    layout = Layout(whole(fields, NAME, layers, context=context))
    magnitude = rope_magnitude(fields)
    for block in range(blocks):
        source, ours = f"model.layers.{block}", f"layers.{2 * block}"
        layout.place_layer(
            2 * block,
            norm=f"{source}.input_layernorm",
            mixer=f"{source}.self_attn",
            joined={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        )
        for which, count in (("q", attn.n_heads), ("k", attn.n_kv_heads)):
            for head in range(count):
                rotated_rows = slice(head * size, head * size + rotation.dim)
                layout.multiply(f"{ours}.{which}_proj", magnitude, rotated_rows)
        layout.place_layer(
            2 * block + 1,
            norm=f"{source}.post_attention_layernorm",
            mixer=f"{source}.mlp",
            joined={"gate_up_proj": ("gate_proj", "up_proj")},
        )
    layout.place_ends("model.norm")
    return layout


FAMILY = Family.of_transformers(NAME, "Phi3ForCausalLM", read)
