"""Llama 1 to 3: attention with grouped heads and RoPE, then a gated MLP.

Source: transformers 5.23 models/llama, `LlamaForCausalLM`. `pretraining_tp` splits products that
are summed again; `initializer_range` and dropouts are of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge.config import AttentionConfig, MlpConfig, ModelConfig
from edge.export.checkpoint.family import (
    MAX_BLOCKS,
    ROPES,
    UNSUPPORTED,
    Family,
    attention,
    head_dim,
    known_only,
    positions,
    rope,
    rope_magnitude,
    whole,
)
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout
from edge.mixers.base import MixerConfig

NAME = "llama"
_OWN = {"attention_bias", "head_dim", "mlp_bias"}
FEED_FORWARD = ("post_attention_layernorm", "mlp")


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    return read_blocks(fields, NAME, context=positions(fields, 2048))


def read_blocks(
    fields: Fields,
    family: str,
    *,
    context: int,
    kv_heads: int | None = None,
    eps: float = 1e-6,
    attention_bias: bool | None = None,
    out_bias: bool | None = None,
    qk_norm: bool = False,
    size: int | None = None,
    theta: float = 10000.0,
    rotates: Sequence[bool] = (),
    tied: bool = False,
    feed: Callable[[int], Sequence[MixerConfig]] | None = None,
) -> Layout:
    """The model, for Llama and its kin.

    Args:
        kv_heads: by default; None are as many as heads.
        attention_bias: None is as the field says.
        out_bias: of `o_proj`; None is `attention_bias`, of q, k and v.
        size: of a head where `head_dim` is absent; None is `hidden_size / num_attention_heads`.
        theta: of RoPE, where the config does not say.
        rotates: whether RoPE turns q and k of a block; none are all.
        tied: the default of `tie_word_embeddings`.
        feed: what follows the attention of a block; None is an MLP of `intermediate_size`.
    """
    fields.demand("hidden_act", "silu", UNSUPPORTED)
    heads = fields.integer("num_attention_heads", 32)
    own = "head_dim" in fields or size is not None
    size = fields.integer("head_dim", size) if own else head_dim(fields, heads)
    rotation = rope(fields, size, theta=theta, kinds=(*ROPES, "yarn"))
    if rotation.dim != size:
        name = "rope_parameters.partial_rotary_factor"
        fields.inconsistent(name, "is not 1", UNSUPPORTED)
    if attention_bias is None:
        attention_bias = fields.boolean("attention_bias", False)
    turning = attention(
        fields,
        kv_heads=kv_heads,
        size=size,
        bias=attention_bias,
        rope=rotation,
        qk_norm=qk_norm,
        **({} if out_bias is None else {"out_bias": out_bias}),
    )
    if feed is None:
        mlp = fields.build(
            MlpConfig,
            d_intermediate=fields.integer("intermediate_size"),
            bias=fields.boolean("mlp_bias", False),
        )
    blocks = fields.integer("num_hidden_layers", high=MAX_BLOCKS)
    layers = [
        layer
        for block, turned in enumerate(rotates or [True] * blocks)
        for layer in (
            turning if turned else turning.model_copy(update={"rope": None}),
            *([mlp] if feed is None else feed(block)),
        )
    ]
    config = whole(fields, family, layers, eps=eps, tied=tied, context=context)
    layout, magnitude = place(config), rope_magnitude(fields)
    for index, layer in enumerate(config.layers):
        if isinstance(layer, AttentionConfig) and layer.rope is not None:
            for which in "qk":
                layout.multiply(
                    f"layers.{index}.{which}_{'norm' if qk_norm else 'proj'}", magnitude
                )
    return layout


def place(config: ModelConfig) -> Layout:
    """Where `LlamaForCausalLM` and its kin keep their tensors; a block begins with attention."""
    layout = Layout(config, ignored=lambda name: name.endswith("rotary_emb.inv_freq"))
    block = -1
    for index, layer in enumerate(config.layers):
        block += layer.attends
        part = ("input_layernorm", "self_attn") if layer.attends else FEED_FORWARD
        layout.place_block(index, f"model.layers.{block}", part, rename={"router": "gate"})
    layout.place_ends("model.norm")
    return layout


FAMILY = Family.of_transformers(NAME, "LlamaForCausalLM", read)
