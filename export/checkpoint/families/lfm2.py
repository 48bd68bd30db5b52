"""LFM2: gated short convolutions, or attention with normed heads, each followed by a gated MLP.

Source: transformers 5.23 models/lfm2, `Lfm2ForCausalLM`. With `block_auto_adjust_ff_dim` the MLP is
two thirds of the stated width, rounded up. The last norm is called `embedding_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge.config import AttentionConfig, MlpConfig, ModelConfig, NormConfig, ShortConvConfig
from edge.export.checkpoint.family import Family, attention, head_dim, known_only, layer_types, rope
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout
from edge.mixers.base import MixerConfig, Norms

NAME = "lfm2"
THETA = 1e6
_OWN = {
    "block_auto_adjust_ff_dim", "block_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of",
    "conv_L_cache", "conv_bias", "full_attn_idxs", "layer_types", "norm_eps", "tie_embedding",
}  # fmt: skip
# In published configs, but read by no class: repeated sizes, and initialisation.
_IGNORED = {
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
    "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out",
    "conv_use_xavier_init", "num_heads", "use_pos_enc",
}  # fmt: skip
_KINDS = {"conv": "conv", "full_attention": "attention"}
_ATTENTION = {
    "o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm",
}  # fmt: skip


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN | _IGNORED)
    mlp = fields.build(MlpConfig, d_intermediate=_mlp_width(fields))
    return read_blocks(fields, NAME, lambda block: mlp)


def read_blocks(fields: Fields, family: str, feed: Callable[[int], MixerConfig]) -> Layout:
    """Read the layout of LFM2 and its relatives; `feed` returns each block's second layer."""
    blocks = fields.blocks()
    if "layer_types" in fields:
        kinds = layer_types(fields, blocks, _KINDS, "conv")
    else:
        # if absent, every block has attention
        attention_blocks = fields.indices("full_attn_idxs", blocks)
        all_attend = "full_attn_idxs" not in fields
        kinds = [
            "attention" if all_attend or n in attention_blocks else "conv" for n in range(blocks)
        ]
    mixers: dict[str, Any] = {"conv": short_conv(fields, 3), "attention": _attention(fields)}
    layers: list[Any] = []
    for block, kind in enumerate(kinds):
        layers += [mixers[kind], feed(block)]
    context = fields.integer("max_position_embeddings", 128000)
    tied = "tie_embedding" if "tie_embedding" in fields else "tie_word_embeddings"
    config = fields.model(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        d_model=fields.integer("hidden_size"),
        layers=layers,
        norm=fields.build(NormConfig, eps=fields.epsilon("norm_eps", 1e-5)),
        tie_embeddings=fields.boolean(tied, True),
        max_context=context if "attention" in kinds else None,
    )
    return place(config, _ATTENTION)


def short_conv(fields: Fields, width: int, norms: Norms = "before") -> ShortConvConfig:
    """Read the short convolution over `width` channels."""
    return fields.build(
        ShortConvConfig,
        d_model=fields.integer("hidden_size"),
        d_conv=fields.integer("conv_L_cache", width, low=2, high=16),
        bias=fields.boolean("conv_bias", False),
        norms=norms,
    )


def _mlp_width(fields: Fields) -> int:
    stated = "block_ff_dim" if "block_ff_dim" in fields else "intermediate_size"
    width = fields.integer(stated)
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return width
    width = max(1, int(2 * width / 3))
    if fields.values.get("block_ffn_dim_multiplier", 1.0) is None:
        return width
    multiple = fields.integer("block_multiple_of", 256)
    width = fields.scaled("block_ffn_dim_multiplier", width, 1.0)
    return width + -width % multiple


def _attention(fields: Fields) -> AttentionConfig:
    size = head_dim(fields, fields.integer("num_attention_heads", 32))
    rotation = rope(fields, size, theta=THETA)
    return attention(fields, kv_heads=8, size=size, rope=rotation, qk_norm=True)


def place(config: ModelConfig, attention: dict[str, str]) -> Layout:
    """Place the two layers of each block, for LFM2 and its relatives.

    `attention`: canonical name of a module → the checkpoint's.
    """
    layout = Layout(config)
    for index in range(0, len(config.layers), 2):
        source, first = f"model.layers.{index // 2}", config.layers[index]
        both = first.norms == "both"
        layout.place_layer(
            index,
            norm=f"{source}.operator_norm",
            mixer=f"{source}.{'self_attn' if first.attends else 'conv'}",
            post_norm=f"{source}.post_operator_norm" if both else "",
            rename=attention if first.attends else {"conv1d": "conv"},
        )
        layout.place_layer(
            index + 1,
            norm=f"{source}.ffn_norm",
            mixer=f"{source}.feed_forward",
            post_norm=f"{source}.post_ffn_norm" if both else "",
            rename={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "router": "gate"},
        )
    layout.place_ends("model.embedding_norm")
    return layout


FAMILY = Family.of_transformers(NAME, "Lfm2ForCausalLM", read)
