"""Jamba: blocks of Mamba-1, whose dt, B and C are normed, or attention, each followed by a gated
MLP; every `expert_layer_period`th MLP is a mixture of experts.

Source: transformers 5.23 models/jamba, `JambaForCausalLM`. Its attention has no position encoding.
An expert's gate is its softmax over all experts, so gates do not sum to one.
"""

from __future__ import annotations

from typing import Any

from edge.config import MlpConfig
from edge.export.checkpoint.families import bamba
from edge.export.checkpoint.family import Family, attention, experts, known_only, whole
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout
from edge.export.checkpoint.state_spaces import mamba1_of

NAME = "jamba"
_OWN = {
    "attn_layer_offset", "attn_layer_period", "expert_layer_offset", "expert_layer_period",
    "layers_block_type", "layer_types", "mamba_conv_bias", "mamba_d_conv", "mamba_d_state",
    "mamba_dt_rank", "mamba_expand", "mamba_inner_layernorms", "mamba_proj_bias",
    "n_ctx", "num_experts", "num_experts_per_tok", "use_associative_scan",
}  # fmt: skip
MAMBA = "mamba_expand mamba_d_state mamba_d_conv mamba_dt_rank mamba_conv_bias mamba_proj_bias"
_NORMS = {"dt_norm": "dt_layernorm", "B_norm": "b_layernorm", "C_norm": "c_layernorm"}


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    fields.demand("hidden_act", "silu")
    fields.demand("mamba_inner_layernorms", True)
    blocks = fields.blocks()
    attends = _periodic(fields, "attn", blocks, (8, 4))
    eps = fields.epsilon("rms_norm_eps", 1e-6)
    mamba = mamba1_of(fields, fields.integer("hidden_size"), MAMBA, inner_eps=eps)
    attn = attention(fields, kv_heads=8)
    count, width = fields.integer("num_experts", 16), fields.integer("intermediate_size")
    mlp = fields.build(MlpConfig, d_intermediate=width)
    moe = experts(fields, count, width, normalise=False) if count > 1 else mlp
    layers: list[Any] = []
    for attend, has_experts in zip(
        attends, _periodic(fields, "expert", blocks, (2, 1)), strict=True
    ):
        layers += [attn if attend else mamba, moe if has_experts else mlp]
    context = fields.integer("max_position_embeddings", 262144)
    config = whole(fields, NAME, layers, eps=1e-6, context=context)
    return bamba.place(config, attends, _NORMS)


def _periodic(fields: Fields, prefix: str, blocks: int, defaults: tuple[int, int]) -> list[bool]:
    """Return which blocks have attention, or experts."""
    period = fields.integer(f"{prefix}_layer_period", defaults[0])
    offset = fields.integer(f"{prefix}_layer_offset", defaults[1], low=0)
    if offset >= period:
        message = f"is {offset}, not below {prefix}_layer_period"
        fields.inconsistent(f"{prefix}_layer_offset", message)
    return [block % period == offset for block in range(blocks)]


FAMILY = Family.of_transformers(NAME, "JambaForCausalLM", read)
