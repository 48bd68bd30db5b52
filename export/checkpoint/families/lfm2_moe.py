"""LFM2 with experts: like LFM2, with a mixture of experts for MLP after the first few blocks.

Source: transformers 5.23 models/lfm2_moe, `Lfm2MoeForCausalLM`, which adds 1e-6 to the sum by which
it divides gates.
"""

from __future__ import annotations

from edge.config import ExpertsConfig, MlpConfig
from edge.export.checkpoint.families import lfm2
from edge.export.checkpoint.family import Family, experts, known_only
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "lfm2_moe"
_OWN = {
    "conv_L_cache", "conv_bias", "layer_types", "moe_intermediate_size", "norm_eps",
    "norm_topk_prob", "num_dense_layers", "num_experts", "num_experts_per_tok",
    "routed_scaling_factor", "tie_embedding", "use_expert_bias",
}  # fmt: skip


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    mlp = fields.build(MlpConfig, d_intermediate=fields.integer("intermediate_size", 7168))
    moe = experts(
        fields,
        fields.integer("num_experts", 32),
        fields.integer("moe_intermediate_size", 1792),
        per_token=4,
        score="sigmoid",
        correction=fields.boolean("use_expert_bias", True),
        normalise=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    dense = fields.integer("num_dense_layers", 2, low=0)
    layout = lfm2.read_blocks(fields, NAME, lambda block: mlp if block < dense else moe)
    for index, layer in layout.config.layers_of(ExpertsConfig).items():
        if layer.router.correction:
            bias = f"model.layers.{index // 2}.feed_forward.expert_bias"
            layout.place(f"layers.{index}.router.bias", bias)
    return layout


FAMILY = Family.of_transformers(NAME, "Lfm2MoeForCausalLM", read)
