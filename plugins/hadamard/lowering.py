"""Lowering to the kernel `hadamard`."""

from __future__ import annotations

import numpy as np

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.lowering.context import Lowering, Node, cdiv, next_power_of_2

# Rows of X per step: no padding for p = 80, 8 of 48 rows for p = 40.
_BLOCK_K = 16


def parts_of(at: Lowering, node: Node, width: int) -> tuple[int, int]:
    """Return p and q of the rotation. Raises ExportError when p·q is not `width`."""
    p, q = (at.constant(node.inputs[name]).shape[0] for name in ("slow", "fast"))
    if p * q != width:
        raise ExportError(f"rotates {width} values by {p} x {q}", field=node.name)
    return p, q


def lower(at: Lowering, node: Node) -> None:
    """Launch programs that each compute some rows of slow · X · fast, for one row of x.

    With 16 rows, one row of n = 5120 (p = 80, q = 64) is 5 programs on 5 SMs. Each reads all of X,
    16 rows of slow and all of fast, 41 KB from the L2 cache, and does 147,000 multiplications, in
    two passes of tf32, or three where `fast` is not exact in it, as with 32 columns. That is 2 to
    3 µs on Orin Nano, estimated from these counts, not measured. For many rows of x, programs take
    32 rows where that pads little, to read X less often.
    """
    x = at.view(node.inputs["x"])
    p, q = parts_of(at, node, x.width)
    scales = at.count(node, "scale")
    y = at.new(node.outputs["y"], "i8" if scales else "f32", x.rows, x.width)
    block = 32 if at.regime.many and 4 * cdiv(p, 32) * 32 <= 5 * cdiv(p, 16) * 16 else 16
    at.launch(
        "hadamard.hadamard",
        {**at.given(node, "x", "slow", "fast", "scale"), "y": at.pointer(y)},
        {
            "P": p,
            "Q": q,
            "X_STRIDE": x.stride,
            "SCALES": scales,
            "BLOCK_P": block,
            "BLOCK_K": _BLOCK_K,
            "BLOCK_Q": max(16, next_power_of_2(q)),
            **_exactness(at, node),
        },
        (Size(of=x.rows), Size(times=cdiv(p, block))),
        warps=4,
        stages=4,
    )


def _exactness(at: Lowering, node: Node) -> dict[str, float | bool]:
    """Return constants that say where tf32 needs no third product; none for other matrices."""
    slow, fast = (np.asarray(at.constant(node.inputs[name]).array()) for name in ("slow", "fast"))
    units = np.unique(np.abs(slow[slow != 0]))
    short = not (fast.astype(np.float32).view(np.int32) & 0x1FFF).any()
    return {
        **({"UNIT": float(units[0])} if len(units) == 1 else {}),
        **({"SHORT": True} if short else {}),
    }
