"""Qwen1.5-MoE and Qwen2-MoE: like Qwen2, with experts, plus a gated expert shared by all tokens.

Source: transformers 5.23 models/qwen2_moe, `Qwen2MoeForCausalLM`. The gate is a sigmoid of one
product, so the shared part is a layer with one expert, parallel to the routed experts.
"""

from __future__ import annotations

from edge.config import ExpertsConfig, RouterConfig
from edge.export.checkpoint.families import llama, qwen3_moe
from edge.export.checkpoint.family import Family, known_only, positions, used_windows
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "qwen2_moe"
OWN = qwen3_moe.OWN | {"qkv_bias", "shared_expert_intermediate_size"}
_MATRICES = ("gate_proj", "up_proj", "down_proj")


def read(fields: Fields) -> Layout:
    known_only(fields, OWN)
    moe = qwen3_moe.routed(fields, 60, 1408, per_token=4)
    context = positions(fields, 32768)
    layout = llama.read_blocks(
        fields,
        NAME,
        kv_heads=16,
        context=context,
        windows=used_windows(
            fields, context, lambda block, first: block % 2 == 0 and block < first
        ),
        attention_bias=fields.boolean("qkv_bias", True),
        out_bias=False,
        feed=qwen3_moe.feed(fields, moe, shared(fields, 5632)),
    )
    place_shared(layout)
    return layout


def shared(fields: Fields, width: int) -> ExpertsConfig:
    """Read the expert that all tokens share; `width` is the default width."""
    return fields.build(
        ExpertsConfig,
        n_experts=1,
        d_intermediate=fields.integer("shared_expert_intermediate_size", width),
        router=RouterConfig(top_k=1, score="sigmoid", normalise=False),
        parallel=True,
    )


def place_shared(layout: Layout) -> None:
    """Place the tensors of `shared` after each placed layer of experts."""
    for index, layer in layout.config.layers_of(ExpertsConfig).items():
        if layer.is_parallel:
            ours, mlp = f"layers.{index}", layout.pieces[f"layers.{index - 1}.router.weight"].source
            theirs = mlp.removesuffix("gate.weight") + "shared_expert"
            layout.place(f"{ours}.router.weight", f"{theirs}_gate.weight")
            for name in _MATRICES:
                layout.place_each(f"{ours}.{name}.weight", [f"{theirs}.{name}.weight"])


def place_stacks(layout: Layout) -> None:
    """Add the alternative form of placed layers' experts: two stacks of matrices."""
    for index, layer in layout.config.layers_of(ExpertsConfig).items():
        if layer.is_parallel:
            continue
        ours = f"layers.{index}"
        mlp = layout.pieces[f"{ours}.router.weight"].source.removesuffix("gate.weight")
        for stack, names in (("gate_up_proj", _MATRICES[:2]), ("down_proj", _MATRICES[2:])):
            own = tuple(f"{ours}.{name}.weight" for name in names)
            layout.place_stacked(own, f"{mlp}experts.{stack}", otherwise=True)


FAMILY = Family.of_transformers(NAME, "Qwen2MoeForCausalLM", read)
