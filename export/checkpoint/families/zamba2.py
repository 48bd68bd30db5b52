"""Zamba2: Mamba-2 layers, some of which also read a shared block of attention and MLP.

Source: transformers 5.23 models/zamba2, `Zamba2ForCausalLM`. The shared blocks take turns. Each use
has its own low-rank adapters and its own matrix after the block. They are multiplied out here, so
every use has separate matrices. transformers clamps dt to at least `time_step_min` in prefill but
not in decode; Zyphra's kernels never do, and neither does this reader.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edge.config import AttentionConfig, Mamba2Config, MlpConfig, ModelConfig, NormConfig
from edge.export.checkpoint.families import zamba
from edge.export.checkpoint.family import Family, known_only, layer_types, rope
from edge.export.checkpoint.fields import UNSUPPORTED, Fields
from edge.export.checkpoint.layout import Layout, SourceTensor

NAME = "zamba2"
EPS = 1e-5  # of the gated norm, whatever the other norms have
_OWN = {
    "adapter_rank", "add_bias_linear", "attention_head_dim", "attention_hidden_size", "chunk_size",
    "hybrid_layer_ids", "kv_channels", "layers_block_type", "layer_types", "mamba_d_conv",
    "mamba_d_state", "mamba_expand", "mamba_headdim", "mamba_ngroups", "n_mamba_heads",
    "num_mem_blocks", "num_query_groups", "time_step_limit", "use_conv_bias", "use_long_context",
    "use_mem_eff_path", "use_mem_rope", "use_shared_attention_adapter",
}  # fmt: skip
# of Zyphra's fork of transformers, with other fields and tensors
_FORK_FIELD = "use_shared_block_lora"


def read(fields: Fields) -> Layout:
    if _FORK_FIELD in fields:
        remedy = "use the checkpoint in transformers' own form"
        fields.stop(_FORK_FIELD, "is a field of Zyphra's fork of transformers", remedy)
    known_only(fields, _OWN)
    for name, expected in (
        ("hidden_act", "gelu"), ("rms_norm_eps", EPS), ("use_long_context", False),
        ("tie_word_embeddings", True),  # otherwise its class does not tie the blocks either
    ):  # fmt: skip
        fields.demand(name, expected)
    blocks = fields.blocks()
    kinds = layer_types(fields, blocks, zamba.KINDS, "mamba")
    if "layers_block_type" not in fields:
        fields.refuse("layers_block_type", "is missing")
    bias = fields.boolean("add_bias_linear", False)
    width = fields.integer("hidden_size")
    mlp = fields.build(
        MlpConfig,
        d_intermediate=fields.integer("intermediate_size", 4 * width),
        bias=bias,
        form="geglu",
        aside=True,
    )
    mamba, attention = _mamba(fields, bias), _attention(fields)
    layers: list[Any] = []
    for kind in kinds:
        layers += [attention, mlp, mamba] if kind == "hybrid" else [mamba]
    context = fields.integer("max_position_embeddings", 4096)
    config = fields.model(
        family=NAME,
        vocab_size=fields.integer("vocab_size"),
        d_model=width,
        layers=layers,
        norm=fields.build(NormConfig, eps=EPS),
        max_context=context if "hybrid" in kinds else None,
    )
    adapted = fields.boolean("use_shared_attention_adapter", False)
    return _place(
        config,
        [kind == "hybrid" for kind in kinds],
        fields.integer("num_mem_blocks", 1),
        fields.integer("adapter_rank", 128),
        ("q_proj", "k_proj", "v_proj") if adapted else (),
    )


def _mamba(fields: Fields, bias: bool) -> Mamba2Config:
    d_inner = fields.scaled("mamba_expand", fields.integer("hidden_size"), 2)
    heads = fields.integer("n_mamba_heads", 8)
    if d_inner % heads:
        fields.inconsistent("n_mamba_heads", f"does not divide {d_inner} channels")
    return fields.build(
        Mamba2Config,
        d_inner=d_inner,
        d_ssm=d_inner,
        d_state=fields.integer("mamba_d_state", 64),
        d_conv=fields.taps("mamba_d_conv"),
        head_dim=max(1, d_inner // heads),
        n_groups=fields.integer("mamba_ngroups", 1),
        proj_bias=bias,
    )


def _attention(fields: Fields) -> AttentionConfig:
    heads, width = fields.integer("num_attention_heads", 32), 2 * fields.integer("hidden_size")
    if width % heads:
        fields.inconsistent("num_attention_heads", f"does not divide {width}")
    size = max(1, width // heads)
    if fields.integer("num_key_value_heads", heads) != heads:
        fields.refuse("num_key_value_heads", f"is not {heads}", UNSUPPORTED)
    uses_rope = fields.boolean("use_mem_rope", False)
    return fields.build(
        AttentionConfig,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=size,
        rope=rope(fields, size, kinds=("default",)) if uses_rope else None,
        recalls=True,
    )


def _place(
    config: ModelConfig, hybrid: list[bool], shared: int, rank: int, adapted: tuple[str, ...]
) -> Layout:
    layout = Layout(config)
    hybrids = [block for block, is_hybrid in enumerate(hybrid) if is_hybrid]

    def place_shared(layer: int, use: int) -> None:
        first = f"model.layers.{hybrids[use % shared]}.shared_transformer"
        _place_shared(layout, layer, first, use, rank, adapted)

    zamba.place_blocks(layout, hybrid, place_shared)
    return layout


def _place_shared(
    layout: Layout, layer: int, source: str, use: int, rank: int, adapted: tuple[str, ...]
) -> None:
    """Place one use of a shared block: attention is `layer`, the MLP the layer after it."""
    layout.place_layer(layer, norm=f"{source}.input_layernorm", mixer=f"{source}.self_attn")
    # scores are divided by the root of half the head size
    layout.multiply(f"layers.{layer}.q_proj", math.sqrt(2))
    for name in adapted:
        adapter = f"{source}.self_attn.linear_{name[0]}_adapter_list.{use}"
        _adapt(layout, f"layers.{layer}.{name}.weight", adapter, rank)
    ours, theirs = f"layers.{layer + 1}", f"{source}.feed_forward"
    layout.place_layer(
        layer + 1,
        norm=f"{source}.pre_ff_layernorm",
        mixer=theirs,
        joined={"gate_up_proj": ("gate_proj", "up_proj")},
    )
    for name in ("gate_proj", "up_proj"):
        adapter = f"{theirs}.gate_up_proj_adapter_list.{use}"
        _adapt(layout, f"{ours}.{name}.weight", adapter, rank)


def _adapt(layout: Layout, name: str, source: str, rank: int) -> None:
    piece = layout.pieces[name]
    rows, columns = piece.source_shape
    up, down = (
        SourceTensor(f"{source}.1.weight", (rows, rank)),
        SourceTensor(f"{source}.0.weight", (rank, columns)),
    )
    layout.pieces[name] = replace(piece, adapter=(up, down))


FAMILY = Family.of_transformers(NAME, "Zamba2ForCausalLM", read, form="in transformers' own form")
