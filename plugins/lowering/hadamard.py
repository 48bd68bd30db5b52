"""How `kernels.hadamard` is called: Hadamard and HadamardQuantize."""

from __future__ import annotations

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.lowering.context import Lower, Lowering, Node, cdiv, next_power_of_2

# Rows of X at a time: no row of padding for p = 80, 8 of 48 for p = 40.
_BLOCK_K = 16


def lower_hadamard(at: Lowering, node: Node) -> None:
    """A program makes some rows of slow · X · fast, of one row of x.

    With 16 rows, one row of n = 5120 (p = 80, q = 64) is 5 programs on as many SMs: each reads all
    of X, 16 rows of slow and all of fast, 41 KB from the L2 cache, and multiplies 147,000 times
    (three passes of tf32; emulated, these round 5 of a million values otherwise than fp32).
    Estimated from these counts, not measured: 2 to 3 µs on Orin Nano. Many rows take 32 at once
    where that pads little, to read X less often.
    """
    x = at.view(node.inputs[0])
    slow, fast = (at.constant(name) for name in node.inputs[1:3])
    p, q = slow.shape[0], fast.shape[0]
    if p * q != x.width:
        raise ExportError(f"rotates {x.width} values by {p} x {q}", field=node.name)
    scale = at.constant(node.inputs[3]) if node.op == "HadamardQuantize" else None
    y = at.new(node.outputs[0], "f32" if scale is None else "i8", x.rows, x.width)
    block = 32 if at.regime.many and 4 * cdiv(p, 32) * 32 <= 5 * cdiv(p, 16) * 16 else 16
    at.launch(
        "hadamard.hadamard",
        {
            "x": at.pointer(x),
            "slow": at.pointer(slow),
            "fast": at.pointer(fast),
            "scale": at.pointer(scale),
            "y": at.pointer(y),
        },
        {
            "P": p,
            "Q": q,
            "X_STRIDE": x.stride,
            "SCALES": 0 if scale is None else scale.size,
            "BLOCK_P": block,
            "BLOCK_K": _BLOCK_K,
            "BLOCK_Q": max(16, next_power_of_2(q)),
        },
        (Size(of=x.rows), Size(times=cdiv(p, block))),
        warps=4,
        stages=4,
    )


LOWER: dict[str, Lower] = {"Hadamard": lower_hadamard, "HadamardQuantize": lower_hadamard}
