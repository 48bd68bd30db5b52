"""Falcon-H1: Mamba-2 and attention side by side in every block, then a gated MLP; µP factors.

Source: transformers 5.23 models/falcon_h1, `FalconH1ForCausalLM`. Both mixers read one norm. Here
attention is a layer parallel to the scan's, with a copy of its norm. The factors are moved into
weights (`Layout.multiply`).
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from edge.config import AttentionConfig, Mamba2Config, MlpConfig, ModelConfig
from edge.export.checkpoint.families import bamba
from edge.export.checkpoint.family import Family, attention, head_size, known_only, rope, whole
from edge.export.checkpoint.fields import Fields, show
from edge.export.checkpoint.layout import Layout

NAME = "falcon_h1"
_FACTORS = (
    "attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier",
    "key_multiplier", "lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip
_OWN = bamba.MAMBA | {
    *_FACTORS, "attention_bias", "head_dim", "mamba_d_ssm", "mamba_norm_before_gate",
    "mamba_rms_norm", "mamba_use_mlp", "mlp_bias", "mlp_expansion_factor", "mlp_multipliers",
    "projectors_bias", "ssm_multipliers", "layers_block_type", "layer_types",
}  # fmt: skip


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    fields.demand("hidden_act", "silu")
    fields.demand("mamba_use_mlp", True)
    blocks = fields.blocks()
    biases = {n: fields.boolean(n, False) for n in ("mamba_proj_bias", "projectors_bias")}
    mamba = bamba.mamba2(
        fields,
        "mamba_d_ssm" if "mamba_d_ssm" in fields else "mamba_expand",
        gated_norm=fields.boolean("mamba_rms_norm", False),
        norm_before_gate=fields.boolean("mamba_norm_before_gate", True)
        and fields.boolean("mamba_rms_norm", False),
        proj_bias=any(biases.values()),
    )
    mlp = fields.build(
        MlpConfig,
        d_intermediate=fields.integer("intermediate_size"),
        bias=fields.boolean("mlp_bias", False),
    )
    factors = {name: fields.number(name, 1.0) for name in _FACTORS}
    ssm_factors = _numbers(fields, "ssm_multipliers", 5)
    mlp_factors = _numbers(fields, "mlp_multipliers", 2)
    for name in ("embedding_multiplier", "lm_head_multiplier"):
        if not factors[name] > 0:
            fields.refuse(name, f"is {factors[name]}, not above 0")
    context = fields.integer("max_position_embeddings", 8192)
    config = whole(fields, NAME, [mamba, _attention(fields), mlp] * blocks, context=context)
    layout = _place(config, blocks, biases)
    for block in range(blocks):
        _multiply(layout, 3 * block, mamba, factors, ssm_factors, mlp_factors)
    layout.multiply_ends(factors["embedding_multiplier"], factors["lm_head_multiplier"])
    return layout


def _numbers(fields: Fields, name: str, count: int) -> list[float]:
    """Read `count` numbers; if absent, all are 1."""
    values = fields.values.get(name)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        fields.refuse(name, f"is {show(values)}, not {count} numbers")
        return [1.0] * count
    elements = Fields(
        fields.file, {str(i): v for i, v in enumerate(values)}, f"{name}.", fields.refused
    )
    return [elements.number(str(index)) for index in range(count)]


def _attention(fields: Fields) -> AttentionConfig:
    size = head_size(fields)
    bias = fields.boolean("attention_bias", False)
    rotation = rope(fields, size)
    return attention(fields, kv_heads=8, size=size, bias=bias, rope=rotation, parallel=True)


def _place(config: ModelConfig, blocks: int, biases: dict[str, bool]) -> Layout:
    layout = Layout(config, ignored=lambda name: name.endswith(("inv_freq", "mup_vector")))
    for block in range(blocks):
        source, ours = f"model.layers.{block}", f"layers.{3 * block}"
        mixers = (("input_layernorm", "mamba"), ("input_layernorm", "self_attn"))
        layout.place_block(3 * block, source, *mixers, bamba.MLP)
        for name, bias in (("in_proj", "mamba_proj_bias"), ("out_proj", "projectors_bias")):
            if any(biases.values()) and not biases[bias]:
                del layout.pieces[f"{ours}.{name}.bias"]
                layout.constants[f"{ours}.{name}.bias"] = 0.0
    layout.place_ends("model.final_layernorm")
    return layout


def _multiply(
    layout: Layout,
    first: int,
    mamba: Mamba2Config,
    factors: dict[str, float],
    ssm_factors: list[float],
    mlp_factors: list[float],
) -> None:
    """Move the factors of one block into its weights."""
    scan, attention, mlp = (f"layers.{first + offset}" for offset in range(3))
    layout.multiply(f"{scan}.in_proj", factors["ssm_in_multiplier"], kinds=("weight",))
    widths = (mamba.d_ssm, mamba.d_ssm, mamba.group_states, mamba.group_states, mamba.n_heads)
    for (start, stop), factor in zip(
        pairwise(accumulate(widths, initial=0)), ssm_factors, strict=True
    ):
        layout.multiply(f"{scan}.in_proj", factor, slice(start, stop))
    layout.multiply(f"{scan}.out_proj", factors["ssm_out_multiplier"])
    for name in ("q_proj", "k_proj", "v_proj"):
        layout.multiply(
            f"{attention}.{name}", factors["attention_in_multiplier"], kinds=("weight",)
        )
    layout.multiply(f"{attention}.k_proj", factors["key_multiplier"])
    layout.multiply(f"{attention}.o_proj", factors["attention_out_multiplier"])
    layout.multiply(f"{mlp}.gate_proj", mlp_factors[0])
    layout.multiply(f"{mlp}.down_proj", mlp_factors[1])


FAMILY = Family.of_transformers(NAME, "FalconH1ForCausalLM", read)
