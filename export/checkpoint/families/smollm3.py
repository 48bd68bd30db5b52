"""SmolLM3: Llama's blocks, some of them without position encoding.

Source: transformers 5.23 models/smollm3, `SmolLM3ForCausalLM`. `no_rope_layers` holds 1 for a block
with RoPE and 0 for one without; absent, every `no_rope_layer_interval`-th block has none.
"""

from __future__ import annotations

from edge.export.checkpoint.families import llama
from edge.export.checkpoint.family import Family, known_only, positions, used_windows
from edge.export.checkpoint.fields import Fields, show
from edge.export.checkpoint.layout import Layout

NAME = "smollm3"
THETA = 2e6
_OWN = {
    "attention_bias", "layer_types", "max_window_layers", "mlp_bias", "no_rope_layer_interval",
    "no_rope_layers", "sliding_window", "use_sliding_window",
}  # fmt: skip


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    context, uses_rope = positions(fields, 32768), _uses_rope(fields)
    return llama.read_blocks(
        fields,
        NAME,
        kv_heads=4,
        context=context,
        windows=used_windows(fields, context, lambda block, _: not uses_rope[block]),
        theta=THETA,
        turned=[fields if rotates else None for rotates in uses_rope],
        tied=True,
    )


def _uses_rope(fields: Fields) -> list[bool]:
    """Return whether each block has RoPE."""
    blocks = fields.blocks()
    interval = fields.integer("no_rope_layer_interval", 4)
    default = [(index + 1) % interval != 0 for index in range(blocks)]
    listed = fields.values.get("no_rope_layers")
    if listed is None:
        return default
    if (
        not isinstance(listed, list)
        or len(listed) != blocks
        or any(v not in (0, 1) for v in listed)
    ):
        fields.refuse("no_rope_layers", f"is {show(listed)}, not {blocks} times 0 or 1")
        return default
    return [bool(value) for value in listed]


FAMILY = Family.of_transformers(NAME, "SmolLM3ForCausalLM", read)
