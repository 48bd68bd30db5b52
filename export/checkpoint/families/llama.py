"""Llama 1 to 3: attention with grouped heads and RoPE, then a gated MLP.

Source: transformers 5.23 models/llama, `LlamaForCausalLM`. `pretraining_tp` splits products and
sums them again; `initializer_range` and dropouts only concern training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edge.config import MlpConfig, ModelConfig, RopeConfig
from edge.export.checkpoint.family import (
    ROPES,
    Family,
    attention,
    head_size,
    known_only,
    positions,
    rope,
    rope_magnitude,
    whole,
)
from edge.export.checkpoint.fields import UNSUPPORTED, Fields
from edge.export.checkpoint.layout import Layout
from edge.mixers.base import MixerConfig, Norms

NAME = "llama"
_OWN = {"attention_bias", "head_dim", "mlp_bias"}
BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
# (whether a layer attends, where it has norms) → (names of its norms before and after), mixer name
_NORMS = {
    (True, "before"): (("input_layernorm", ""), "self_attn"),
    (True, "behind"): (("", BEHIND[0]), "self_attn"),
    (True, "both"): (("input_layernorm", BEHIND[0]), "self_attn"),
    (False, "before"): (("post_attention_layernorm", ""), "mlp"),
    (False, "behind"): (("", BEHIND[1]), "mlp"),
    (False, "both"): (("pre_feedforward_layernorm", BEHIND[1]), "mlp"),
}


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
    size: int | None = None,
    theta: float = 10000.0,
    turned: Sequence[Fields | None] = (),
    windows: Sequence[int | None] = (),
    tied: bool = False,
    feed: Callable[[int], Sequence[MixerConfig]] | None = None,
    logits_softcap: float | None = None,
    **attending: Any,
) -> Layout:
    """Read the layout of Llama and its relatives.

    Args:
        kv_heads: default number of KV heads; None is one per head.
        attention_bias: whether attention has biases; None reads the config's field.
        size: size of a head if `head_dim` is absent; None is `hidden_size / num_attention_heads`.
        theta: default base of RoPE.
        turned: fields that describe each block's RoPE; None is a block without RoPE. If empty, all
            blocks read `fields`.
        windows: each block's window in tokens; None is no window. If empty, no block has one.
        tied: default of `tie_word_embeddings`.
        feed: what follows a block's attention; None is an MLP of `intermediate_size`.
        logits_softcap: soft cap on logits.
        attending: further arguments of attention; `norms` also applies to the default MLP.
    """
    size = head_size(fields) if "head_dim" in fields or size is None else size
    blocks = fields.blocks()
    turned = turned or [fields] * blocks
    windows = windows or [None] * blocks
    distinct = {id(section): section for section in turned if section is not None}
    ropes = {key: _rope(section, size, theta) for key, section in distinct.items()}
    if attention_bias is None:
        attention_bias = fields.boolean("attention_bias", False)
    attn = attention(fields, kv_heads=kv_heads, size=size, bias=attention_bias, **attending)
    feed = feed or _mlps(fields, attending.get("norms", "before"))
    layers = [
        layer
        for block, (section, window) in enumerate(zip(turned, windows, strict=True))
        for layer in (
            attn.model_copy(update={"rope": ropes.get(id(section)), "window": window}),
            *feed(block),
        )
    ]
    config = whole(
        fields, family, layers, eps=eps, tied=tied, context=context, logits_softcap=logits_softcap
    )
    layout = place(config)
    _scale_rotated(layout, turned, "norm" if attn.qk_norm else "proj")
    return layout


def _mlps(fields: Fields, norms: Norms) -> Callable[[int], Sequence[MixerConfig]]:
    """Return Llama's MLP after every attention."""
    fields.demand("hidden_act", "silu")
    mlp = fields.build(
        MlpConfig,
        d_intermediate=fields.integer("intermediate_size"),
        bias=fields.boolean("mlp_bias", False),
        norms=norms,
    )
    return lambda block: [mlp]


def _scale_rotated(layout: Layout, sections: Sequence[Fields | None], module: str) -> None:
    """Move RoPE's factor on queries and keys into the modules before it."""
    attention_layers = (i for i, layer in enumerate(layout.config.layers) if layer.attends)
    for index, section in zip(attention_layers, sections, strict=True):
        magnitude = 1.0 if section is None else rope_magnitude(section)
        for name in "qk":
            layout.multiply(f"layers.{index}.{name}_{module}", magnitude)


def _rope(fields: Fields, size: int, theta: float) -> RopeConfig:
    """Read RoPE over whole heads."""
    rotation = rope(fields, size, theta=theta, kinds=(*ROPES, "yarn"))
    if rotation.dim != size:
        name = "rope_parameters.partial_rotary_factor"
        fields.inconsistent(name, "is not 1", UNSUPPORTED)
    return rotation


def place(config: ModelConfig) -> Layout:
    """Place the tensors of `LlamaForCausalLM` and its relatives; blocks begin with attention."""
    layout = Layout(config, ignored=lambda name: name.endswith("rotary_emb.inv_freq"))
    block = -1
    for index, layer in enumerate(config.layers):
        block += layer.attends
        source, (norms, mixer) = f"model.layers.{block}", _NORMS[layer.attends, layer.norms]
        norm, post_norm = (name and f"{source}.{name}" for name in norms)
        layout.place_layer(
            index,
            norm=norm,
            post_norm=post_norm,
            mixer=f"{source}.{mixer}",
            rename={"router": "gate"},
        )
    layout.place_ends("model.norm")
    return layout


FAMILY = Family.of_transformers(NAME, "LlamaForCausalLM", read)
