"""GPT-NeoX and Pythia: attention and an MLP with GELU, side by side or one after the other.

Source: transformers 5.23 models/gpt_neox, `GPTNeoXForCausalLM`. A block is x + attention(norm(x)) +
mlp(norm'(x)) where `use_parallel_residual`. Its joined matrix has the query, key and value rows of
a head next to each other.
"""

from __future__ import annotations

from edge.config import AttentionConfig, MlpConfig, ModelConfig, NormConfig
from edge.export.checkpoint.family import Family, head_dim, known_only, rope
from edge.export.checkpoint.fields import UNSUPPORTED, Fields
from edge.export.checkpoint.layout import Layout

NAME = "gpt_neox"
ROTATED = 0.25
_OWN = {
    "attention_bias", "attention_probs_dropout_prob", "classifier_dropout", "layer_norm_eps",
    "rotary_emb_base", "rotary_pct", "use_parallel_residual",
}  # fmt: skip
_GELU = {
    "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
# Masks and tables stored in older files.
_BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    blocks = fields.blocks()
    attention = _attention(fields)
    config = fields.model(
        family=NAME,
        vocab_size=fields.integer("vocab_size"),
        d_model=fields.integer("hidden_size"),
        layers=[attention, _mlp(fields)] * blocks,
        norm=fields.build(NormConfig, kind="layernorm", eps=fields.epsilon("layer_norm_eps", 1e-5)),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        max_context=fields.integer("max_position_embeddings", 2048),
    )
    return _place(config, attention)


def _attention(fields: Fields) -> AttentionConfig:
    heads = fields.integer("num_attention_heads", 64)
    size = head_dim(fields, heads)
    bias = fields.boolean("attention_bias", True)
    share = fields.number("rotary_pct", ROTATED)
    return fields.build(
        AttentionConfig,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=size,
        rope=rope(fields, size, base="rotary_emb_base", share=share),
        qkv_bias=bias,
        out_bias=bias,
    )


def _mlp(fields: Fields) -> MlpConfig:
    form = _GELU.get(str(fields.values.get("hidden_act", "gelu")))
    if form is None:
        fields.refuse("hidden_act", f"is not one of {', '.join(_GELU)}", UNSUPPORTED)
        form = "gelu"
    return fields.build(
        MlpConfig,
        d_intermediate=fields.integer("intermediate_size"),
        bias=True,
        form=form,
        parallel=fields.boolean("use_parallel_residual", True),
    )


def _place(config: ModelConfig, attention: AttentionConfig) -> Layout:
    # the head has two possible names
    layout = Layout(
        config,
        ignored=lambda name: name.endswith(_BUFFERS),
        rename=lambda name: "embed_out.weight" if name == "lm_head.weight" else name,
    )
    for block in range(len(config.layers) // 2):
        ours, theirs = f"layers.{2 * block}", f"gpt_neox.layers.{block}"
        layout.place_norm(f"{ours}.norm", f"{theirs}.input_layernorm")
        for kind in ("weight", "bias") if attention.qkv_bias else ("weight",):
            names = tuple(f"{ours}.{which}_proj.{kind}" for which in "qkv")
            source = f"{theirs}.attention.query_key_value.{kind}"
            layout.place_heads(names, source, attention.head_dim)
            layout.place(f"{ours}.o_proj.{kind}", f"{theirs}.attention.dense.{kind}")
        layout.place_layer(
            2 * block + 1,
            norm=f"{theirs}.post_attention_layernorm",
            mixer=f"{theirs}.mlp",
            rename={"up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"},
        )
    layout.place_ends(
        "gpt_neox.final_layer_norm",
        embedding="gpt_neox.embed_in.weight",
        lm_head="embed_out.weight",
    )
    return layout


FAMILY = Family.of_transformers(NAME, "GPTNeoXForCausalLM", read)
