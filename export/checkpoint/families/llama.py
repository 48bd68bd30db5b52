"""Llama 1 to 3: attention with grouped heads and RoPE, then a gated MLP.

Source: transformers 5.23 models/llama, `LlamaForCausalLM`. `pretraining_tp` splits products that
are summed again; `initializer_range` and dropouts are of training.
"""

from __future__ import annotations

from edge.config import AttentionConfig, MlpConfig, ModelConfig, NormConfig
from edge.export.checkpoint.family import (
    MAX_BLOCKS,
    UNSUPPORTED,
    Family,
    head_dim,
    is_transformers,
    known_only,
    rope,
)
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "llama"
OWN = {
    "attention_bias", "head_dim", "mlp_bias", "num_key_value_heads", "pretraining_tp",
    "rms_norm_eps", "rope_theta",
}  # fmt: skip
# Left behind by tools that wrote these checkpoints.
_MARKS = {"is_llama_config", "rope_interleaved", "transformers.js_config", "unsloth_version",
          "unsloth_fixed"}  # fmt: skip


def claims(fields: Fields) -> bool:
    return is_transformers(fields, NAME, "LlamaForCausalLM")


def read(fields: Fields) -> Layout:
    """Config and tensor places; raises CheckpointError for a bad field."""
    known_only(fields, OWN | _MARKS)
    fields.demand("rope_interleaved", False, UNSUPPORTED)
    return read_blocks(
        fields,
        NAME,
        kv_heads=None,
        eps=1e-6,
        context=fields.integer("max_position_embeddings", 2048),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def read_blocks(
    fields: Fields,
    family: str,
    *,
    kv_heads: int | None,
    eps: float,
    context: int,
    attention_bias: bool = False,
    mlp_bias: bool = False,
) -> Layout:
    """The model, for Llama and its kin; `kv_heads` None are as many as heads by default."""
    fields.demand("hidden_act", "silu", UNSUPPORTED)
    heads = fields.integer("num_attention_heads", 32)
    own = "head_dim" in fields
    size = fields.integer("head_dim") if own else head_dim(fields, heads)
    rotation = rope(fields, size)
    if rotation.dim != size:
        name = "rope_parameters.partial_rotary_factor"
        fields.inconsistent(name, "is not 1", UNSUPPORTED)
    attention = fields.build(
        AttentionConfig,
        n_heads=heads,
        n_kv_heads=fields.integer("num_key_value_heads", kv_heads or heads),
        head_dim=size,
        rope=rotation,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
    )
    mlp = fields.build(MlpConfig, d_intermediate=fields.integer("intermediate_size"), bias=mlp_bias)
    blocks = fields.integer("num_hidden_layers", high=MAX_BLOCKS)
    config = fields.model(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        d_model=fields.integer("hidden_size"),
        layers=[attention, mlp] * blocks,
        norm=fields.build(NormConfig, eps=fields.epsilon("rms_norm_eps", eps)),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        max_context=context,
    )
    return _place(config, blocks)


def _place(config: ModelConfig, blocks: int) -> Layout:
    layout = Layout(config, ignored=lambda name: name.endswith("rotary_emb.inv_freq"))
    for block in range(blocks):
        source = f"model.layers.{block}"
        layout.place_layer(2 * block, norm=f"{source}.input_layernorm", mixer=f"{source}.self_attn")
        layout.place_layer(
            2 * block + 1, norm=f"{source}.post_attention_layernorm", mixer=f"{source}.mlp"
        )
    layout.place_ends(
        embedding="model.embed_tokens.weight", norm_f="model.norm", lm_head="lm_head.weight"
    )
    return layout


FAMILY = Family(NAME, "model_type llama", claims, read)
