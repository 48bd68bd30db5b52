"""Qwen3-Next: like Qwen3.5, with experts, plus a gated expert shared by all tokens.

Source: transformers 5.23 models/qwen3_next, `Qwen3NextForCausalLM`. The projections of Gated
DeltaNet are in two tensors, grouped by key head. A GGUF file has q, k and v in one tensor, one
after the other, and z in another. Experts' matrices are separate or stacked.
"""

from __future__ import annotations

from edge.config import GatedDeltaNetConfig
from edge.export.checkpoint.families import qwen2_moe, qwen3_5, qwen3_moe
from edge.export.checkpoint.family import Family, known_only
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "qwen3_next"


def read(fields: Fields) -> Layout:
    known_only(fields, qwen3_5.OWN | qwen3_5.LEFT | qwen2_moe.OWN)
    moe = qwen3_moe.routed(fields, 512, 512, per_token=10, normalise=True)
    shared = qwen2_moe.shared(fields, 512)
    layout = qwen3_5.read_blocks(
        fields, NAME, qwen3_moe.feed(fields, moe, shared), _place_by_head, kv_heads=2
    )
    qwen2_moe.place_shared(layout)
    qwen2_moe.place_stacks(layout)
    return layout


def _place_by_head(layout: Layout, ours: str, mixer: str, config: GatedDeltaNetConfig) -> None:
    shared = config.n_heads // config.n_groups
    values = shared * config.head_dim
    parts = {"q": config.d_state, "k": config.d_state, "v": values, "z": values}
    for tensor, widths in (("qkvz", parts), ("ba", {"b": shared, "a": shared})):
        names = [f"{ours}.{name}_proj.weight" for name in widths]
        if tensor == "qkvz":
            layout.otherwise |= {name: layout.pieces[name] for name in names}
        layout.place_turns(names, f"{mixer}.in_proj_{tensor}.weight", [*widths.values()])


FAMILY = Family.of_transformers(NAME, "Qwen3NextForCausalLM", read)
