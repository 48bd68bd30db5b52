"""OLMo Hybrid: Gated DeltaNet, and in every fourth block OLMo 3's attention, with or without RoPE.

Source: transformers 5.23 models/olmo_hybrid, `OlmoHybridForCausalLM`. Blocks of attention have
norms after their parts, the others before them. `linear_allow_neg_eigval` doubles β. Queries, keys
and values have a convolution each. The gated norm's epsilon is 1e-5, whatever the config says.
"""

from __future__ import annotations

from edge.config import AttentionConfig, MlpConfig, ModelConfig, RopeConfig
from edge.export.checkpoint.families import llama, qwen3_5
from edge.export.checkpoint.family import (
    Family,
    attention,
    head_dim,
    known_only,
    layer_types,
    positions,
    rope,
    whole,
)
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Block, Layout, SourceTensor
from edge.mixers.base import MixerConfig

NAME = "olmo_hybrid"
# Initialisation of weights.
_IGNORED = {
    f"linear_{name}" for name in ("a_log_max", "a_log_min", "dt_init_floor", "dt_max", "dt_min")
}
_OWN = qwen3_5.OWN | {"linear_allow_neg_eigval"}
_NORM_EPS = 1e-5
_RENAMED = {"z_proj": "g_proj", "out_proj": "o_proj", "gated_norm": "o_norm"}


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN | _IGNORED)
    fields.demand("hidden_act", "silu")
    blocks = fields.blocks(32)
    kinds = ["attention" if block % 4 == 3 else "deltanet" for block in range(blocks)]
    if "layer_types" in fields:
        kinds = layer_types(fields, blocks, qwen3_5.KINDS, "deltanet")
    mixers = {"deltanet": _deltanet(fields), "attention": _attention(fields)}
    width = fields.integer("intermediate_size", 11008)
    layers: list[MixerConfig] = []
    for kind in kinds:
        mlp = fields.build(MlpConfig, d_intermediate=width, norms=mixers[kind].norms)
        layers += [mixers[kind], mlp]
    context = positions(fields, 65536)
    return _place(whole(fields, NAME, layers, eps=1e-6, context=context), kinds)


def _deltanet(fields: Fields) -> MixerConfig:
    doubled = fields.boolean("linear_allow_neg_eigval", True)
    heads = fields.integer("num_attention_heads", 30)
    keys = fields.integer("linear_num_key_heads", heads)
    size = fields.integer(
        "linear_key_head_dim", max(1, int(0.75 * fields.integer("hidden_size") / keys))
    )
    defaults = {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": 2 * size,
    }
    stated = {name: value for name, value in fields.values.items() if value is not None}
    completed = Fields(fields.file, {**defaults, **stated}, fields.prefix, fields.refused)
    return qwen3_5.deltanet(completed, beta_max=2.0 if doubled else 1.0, norm_eps=_NORM_EPS)


def _attention(fields: Fields) -> AttentionConfig:
    heads = fields.integer("num_attention_heads", 30)
    size = fields.integer("head_dim", head_dim(fields, heads))
    return attention(
        fields,
        size=size,
        bias=fields.boolean("attention_bias", False),
        rope=_rope(fields, size),
        norms="behind",
        qk_norm=True,
        qk_whole=True,
    )


def _rope(fields: Fields, size: int) -> RopeConfig | None:
    """Read RoPE; return None if the file says that there is no base."""
    parameters = fields.values.get("rope_parameters")
    if (
        isinstance(parameters, dict)
        and "rope_theta" in parameters
        and parameters["rope_theta"] is None
    ):
        return None
    return rope(fields, size)


def _place(config: ModelConfig, kinds: list[str]) -> Layout:
    layout = Layout(config, rename=_modern_norm_name)
    for block, kind in enumerate(kinds):
        source, index = f"model.layers.{block}", 2 * block
        if kind == "attention":
            for at, part in (0, "self_attn"), (1, "mlp"):
                post_norm = f"{source}.{llama.BEHIND[at]}"
                layout.place_layer(
                    index + at, norm="", post_norm=post_norm, mixer=f"{source}.{part}"
                )
            continue
        mixer = f"{source}.linear_attn"
        layout.place_layer(index, norm=f"{source}.input_layernorm", mixer=mixer, rename=_RENAMED)
        layout.place_layer(
            index + 1, norm=f"{source}.post_attention_layernorm", mixer=f"{source}.mlp"
        )
        _place_convolutions(layout, index, mixer)
    layout.place_ends("model.norm")
    return layout


def _modern_norm_name(name: str) -> str:
    """Map norm names of files on the hub to transformers'; files that it saved may have both."""
    name = name.replace(".attention_layer_norm.", ".input_layernorm.")
    return name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")


def _place_convolutions(layout: Layout, index: int, mixer: str) -> None:
    layer = layout.config.layers[index]
    assert layer.conv_width is not None
    shapes = layer.tensor_shapes(layout.config.d_model)
    blocks, start = [], 0
    for name in "qkv":
        rows = shapes[f"{name}_proj.weight"][0]
        source = SourceTensor(f"{mixer}.{name}_conv1d.weight", (rows, 1, layer.conv_width))
        blocks.append(Block(source, range(rows), (start, 0)))
        start += rows
    layout.place_blocks(f"layers.{index}.conv1d.weight", blocks)


FAMILY = Family.of_transformers(NAME, "OlmoHybridForCausalLM", read)
