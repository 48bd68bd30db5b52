"""Qwen3.5: Gated DeltaNet, and in every fourth block attention with an output gate, each followed
by an MLP.

Source: transformers 5.23 models/qwen3_5, `Qwen3_5ForCausalLM`, and the language model of
`Qwen3_5ForConditionalGeneration`, whose three-part RoPE is plain RoPE for text. Norms scale by
1 + weight, except the gated norm. Layers that draft (`mtp`) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from edge.config import AttentionConfig, GatedDeltaNetConfig, MlpConfig, ModelConfig
from edge.export.checkpoint.family import (
    Family,
    attention,
    is_transformers,
    known_only,
    layer_types,
    positions,
    rope,
    whole,
)
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout
from edge.mixers.base import MixerConfig

NAME = "qwen3_5"
OWN = {
    "attention_bias", "attn_output_gate", "full_attention_interval", "head_dim", "layer_types",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_value_head_dim", "mamba_ssm_dtype", "partial_rotary_factor",
}  # fmt: skip
# Fields of layers that predict tokens beyond the next, which are ignored, and fields never read.
LEFT = {"mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
# Fields of a multimodal model around the text model: images, their tokens, and repeated sizes.
_MULTIMODAL = {
    "head_dim", "image_token_id", "language_model_only", "text_config", "video_token_id",
    "vision_config", "vision_end_token_id", "vision_start_token_id",
}  # fmt: skip
KINDS = {"linear_attention": "deltanet", "full_attention": "attention"}
_MROPE_KEYS = ("mrope_interleaved", "mrope_section")
_PROJECTIONS: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
_RENAMED = {"router": "gate"} | {f"{name}_proj": f"in_proj_{name}" for name in "zab"}

Place = Callable[[Layout, str, str, GatedDeltaNetConfig], None]


def read(fields: Fields) -> Layout:
    text = of_the_text(fields, OWN)
    mlp = text.build(MlpConfig, d_intermediate=text.integer("intermediate_size", 12288))
    return read_blocks(text, NAME, lambda block: [mlp])


def of_the_text(fields: Fields, own: Iterable[str]) -> Fields:
    """Return the text model's fields, alone or within a larger model; refuse any not in `own`."""
    text = fields if fields.values.get("text_config") is None else _text_section(fields)
    known_only(text, {*own, *LEFT})
    if text is not fields:
        fields.unknown += [f"{text.prefix}{name}" for name in text.unknown]
    text.demand("hidden_act", "silu")
    return text


def _text_section(fields: Fields) -> Fields:
    """Return the text model's section; `tie_word_embeddings` may be next to it."""
    known_only(fields, _MULTIMODAL)
    text, tied = fields.section("text_config"), "tie_word_embeddings"
    if tied in fields:
        text.values = {**text.values, tied: fields.values[tied]}
    return text


def read_blocks(
    fields: Fields,
    family: str,
    feed: Callable[[int], Sequence[MixerConfig]],
    place: Place | None = None,
    kv_heads: int = 4,
) -> Layout:
    """Read the layout of Qwen3.5 and its relatives.

    `feed` gives what follows a block's first mixer. `place` overrides where DeltaNet's projections
    are; its arguments are the layout, the layer, the mixer's name in the source, and the mixer.
    """
    blocks = fields.blocks(32)
    if "layer_types" in fields:
        kinds = layer_types(fields, blocks, KINDS, "deltanet")
    else:
        interval = fields.integer("full_attention_interval", 4)
        kinds = ["deltanet" if (block + 1) % interval else "attention" for block in range(blocks)]
    fields.demand("attn_output_gate", True)
    size = fields.integer("head_dim", 256)
    values = dict(fields.values)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope_fields := values.get(name), dict):
            values[name] = {key: rope_fields[key] for key in rope_fields if key not in _MROPE_KEYS}
    rope_fields = Fields(fields.file, values, fields.prefix, fields.refused)
    mixers: dict[str, MixerConfig] = {
        "deltanet": deltanet(fields),
        "attention": attention(
            fields,
            kv_heads=kv_heads,
            size=size,
            bias=fields.boolean("attention_bias", False),
            rope=rope(rope_fields, size, share=fields.number("partial_rotary_factor", 0.25)),
            qk_norm=True,
            output_gate=True,
        ),
    }
    layers = [layer for n, kind in enumerate(kinds) for layer in (mixers[kind], *feed(n))]
    config = whole(fields, family, layers, eps=1e-6, context=positions(fields, 32768))
    return _place(config, place)


def deltanet(fields: Fields, **values: Any) -> GatedDeltaNetConfig:
    """Read Gated DeltaNet; `values` are further arguments."""
    heads = fields.integer("linear_num_value_heads", 32)
    groups = fields.integer("linear_num_key_heads", 16)
    if heads % groups:
        fields.inconsistent("linear_num_key_heads", f"does not divide {heads} value heads")
    return fields.build(
        GatedDeltaNetConfig,
        n_heads=heads,
        head_dim=fields.integer("linear_value_head_dim", 128),
        n_groups=groups,
        d_state=fields.integer("linear_key_head_dim", 128),
        d_conv=fields.taps("linear_conv_kernel_dim"),
        **values,
    )


def _place(config: ModelConfig, place: Place | None) -> Layout:
    layout = Layout(config, ignored=_is_outside_text_model, rename=_text_name)
    attentions, deltanets = config.layers_of(AttentionConfig), config.layers_of(GatedDeltaNetConfig)
    block = -1
    for index, layer in enumerate(config.layers):
        starts_block = layer.attends or layer.recurrent
        block += starts_block
        source, ours = f"model.layers.{block}", f"layers.{index}"
        mixer = (
            f"{source}.{'self_attn' if layer.attends else 'linear_attn' if starts_block else 'mlp'}"
        )
        norm = "input_layernorm" if starts_block else "post_attention_layernorm"
        joined = {"in_proj_qkv": _PROJECTIONS} if index in deltanets else None
        layout.place_layer(
            index, norm=f"{source}.{norm}", mixer=mixer, rename=_RENAMED, joined=joined
        )
        if (attention := attentions.get(index)) is not None:
            for kind in layout.kinds(f"{ours}.q_proj"):
                both = tuple(f"{ours}.{name}.{kind}" for name in ("q_proj", "gate_proj"))
                layout.place_heads(both, f"{mixer}.q_proj.{kind}", attention.head_dim)
        elif place is not None and (deltanet := deltanets.get(index)) is not None:
            place(layout, ours, mixer, deltanet)
    layout.place_ends("model.norm")
    layout.add_to_norms(1.0, but="gated_norm.weight")
    return layout


def _text_name(name: str) -> str:
    return name.replace("model.language_model.", "model.", 1)


def _is_outside_text_model(name: str) -> bool:
    return name.startswith(("model.visual.", "mtp.", "model.mtp."))


def family(name: str, classes: str, read: Callable[[Fields], Layout]) -> Family:
    """Return a family of text models, alone or within a larger one; `classes` is the prefix of
    their class names."""

    def claims(fields: Fields) -> bool:
        is_text_model = is_transformers(fields, f"{name}_text", f"{classes}ForCausalLM")
        return is_text_model or is_transformers(fields, name, f"{classes}ForConditionalGeneration")

    return Family(name, f"model_type {name} or {name}_text", claims, read)


FAMILY = family(NAME, "Qwen3_5", read)
