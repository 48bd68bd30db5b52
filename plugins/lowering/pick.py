"""How `kernels.pick` is called: the best tokens of the wanted rows, found on the device.

Two ops that no graph has; a program may end with one of them instead of with its logits:

    Greedy(logits) → ids i32 [L·B, 1]
    Best(logits; k) → values f32 [L·B, k], ids i32 [L·B, k]

A row with a NaN has ids -1.
"""

from __future__ import annotations

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.lowering.context import Lower, Lowering, Node, cdiv, next_power_of_2

# More are of no use to a sampler, and fewer are sorted sooner.
MOST = 64
_BLOCK = 2048


def lower_pick(at: Lowering, node: Node) -> None:
    """2048 logits a program: 25 programs a row of 50280, 16 keys a thread to sort.

    Of 256k logits the second launch sorts 128·64 keys, 32 a thread.
    """
    logits = at.view(node.inputs[0])
    k = 1 if node.op == "Greedy" else node.attributes["k"]
    if not 1 <= k <= min(MOST, logits.width):
        raise ExportError(f"picks {k} of {logits.width} tokens", field=node.name)
    count = next_power_of_2(k)
    span = min(_BLOCK, max(count, next_power_of_2(logits.width)))
    blocks = cdiv(logits.width, span)
    keys = at.new(f"{node.outputs[-1]}.keys", "i64", logits.rows, blocks * count)
    at.launch(
        "pick.blocks",
        {"logits": at.pointer(logits), "keys": at.pointer(keys)},
        {"V": logits.width, "STRIDE": logits.stride, "COUNT": count, "BLOCK": span},
        (Size(of=logits.rows), Size(times=blocks)),
        warps=4,
        stages=1,
    )
    values = at.new(node.outputs[0], "f32", logits.rows, k) if node.op == "Best" else None
    ids = at.new(node.outputs[-1], "i32", logits.rows, k)
    block = max(count, next_power_of_2(keys.width))
    at.launch(
        "pick.pick",
        {
            "keys": at.pointer(keys),
            "values": None if values is None else at.pointer(values),
            "ids": at.pointer(ids),
        },
        {"FOUND": keys.width, "K": k, "COUNT": count, "BLOCK": block},
        (Size(of=logits.rows),),
        warps=8 if block > 1024 else 4,
        stages=1,
    )


LOWER: dict[str, Lower] = {"Greedy": lower_pick, "Best": lower_pick}
