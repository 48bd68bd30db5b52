"""Lowering to the kernels of `pick`, which find the best tokens of the wanted rows on the device.

No bundle's graph has these two ops, but a program may end with one of them instead of its logits:

    Greedy(logits) → picked i32 [L·B, 1]
    Best(logits; k) → values f32 [L·B, k], picked i32 [L·B, k]

A row with a NaN has ids -1.
"""

from __future__ import annotations

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.lowering.context import Lowering, Node, cdiv, next_power_of_2

# A sampler needs no more, and fewer are faster to sort.
MOST = 64
_BLOCK = 2048


def lower_best(at: Lowering, node: Node) -> None:
    """Launch one program per 2048 logits: 25 for a row of 50280, with 16 keys a thread to sort.

    For 256k logits the second launch sorts 128·64 keys, 32 a thread.
    """
    logits, picked = at.view(node.inputs["logits"]), node.outputs["picked"]
    k = node.attributes.get("k", 1)
    if not 1 <= k <= min(MOST, logits.width):
        raise ExportError(f"cannot pick {k} of {logits.width} tokens", field=node.name)
    count = next_power_of_2(k)
    span = min(_BLOCK, max(count, next_power_of_2(logits.width)))
    blocks = cdiv(logits.width, span)
    keys = at.new(f"{picked}.keys", "i64", logits.rows, blocks * count)
    at.launch(
        "pick.blocks",
        {"logits": at.pointer(logits), "keys": at.pointer(keys)},
        {"V": logits.width, "STRIDE": logits.stride, "COUNT": count, "BLOCK": span},
        (Size(of=logits.rows), Size(times=blocks)),
        warps=4,
        stages=1,
    )
    values = node.outputs.get("values")
    top_values = at.new(values, "f32", logits.rows, k) if values else None
    ids = at.new(picked, "i32", logits.rows, k)
    block = max(count, next_power_of_2(keys.width))
    at.launch(
        "pick.pick",
        {"keys": at.pointer(keys), "values": at.pointer(top_values), "ids": at.pointer(ids)},
        {"FOUND": keys.width, "K": k, "COUNT": count, "BLOCK": block},
        (Size(of=logits.rows),),
        warps=8 if block > 1024 else 4,
        stages=1,
    )


lower_greedy = lower_best
