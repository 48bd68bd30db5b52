"""Qwen3 with experts: like Qwen3, with a mixture of experts in place of all or some MLPs.

Source: transformers 5.23 models/qwen3_moe, `Qwen3MoeForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge.config import ExpertsConfig, MlpConfig
from edge.export.checkpoint.families import llama, qwen2
from edge.export.checkpoint.family import Family, experts, known_only, positions, used_windows
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout
from edge.mixers.base import MixerConfig

NAME = "qwen3_moe"
OWN = qwen2.OWN | {
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob",
    "num_experts", "num_experts_per_tok", "num_local_experts",
}  # fmt: skip


def read(fields: Fields) -> Layout:
    known_only(fields, OWN | {"attention_bias", "head_dim"})
    context = positions(fields, 32768)
    return llama.read_blocks(
        fields,
        NAME,
        kv_heads=4,
        context=context,
        windows=used_windows(fields, context, lambda *block: True),
        qk_norm=True,
        feed=feed(fields, routed(fields, 128, 768, per_token=8)),
    )


def routed(
    fields: Fields, count: int, width: int, *, per_token: int, normalise: bool = False
) -> ExpertsConfig:
    """Read the experts that a router chooses; arguments are the defaults of the config's fields."""
    # published files have the first, transformers 5 writes the second
    name = "num_experts" if "num_experts" in fields else "num_local_experts"
    return experts(
        fields,
        fields.integer(name, count),
        fields.integer("moe_intermediate_size", width),
        per_token=per_token,
        normalise=fields.boolean("norm_topk_prob", normalise),
    )


def feed(fields: Fields, *mixed: MixerConfig) -> Callable[[int], Sequence[MixerConfig]]:
    """Return what follows a block's attention: `mixed`, or an MLP in the blocks that have one."""
    mlp = fields.build(MlpConfig, d_intermediate=fields.integer("intermediate_size", 6144))
    dense = fields.indices("mlp_only_layers", fields.integer("num_hidden_layers"))
    step = fields.integer("decoder_sparse_step", 1)
    return lambda block: [mlp] if block in dense or (block + 1) % step else mixed


FAMILY = Family.of_transformers(NAME, "Qwen3MoeForCausalLM", read)
