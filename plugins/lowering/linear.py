"""How `kernels.linear` is called: Linear, with fp32 or fp16 weights."""

from __future__ import annotations

from edge.plugins.lowering.context import Arguments, Lower, Lowering, Node, next_power_of_2
from edge.plugins.lowering.tiles import Tile, few_rows, launch_product


def float_tile(at: Lowering, dtype: str, outputs: int, columns: int) -> Tile:
    """As `int8_tile`, with weights of 2 or 4 bytes and x of 4.

    x takes as much shared memory as 16 outputs of fp16 weights when it has 8 rows, so that steps
    are half as long. fp32 weights are split into two tf32 parts in registers, which 64 columns
    fill: more, shorter steps. Large products of 64 and of 128 rows take 126 registers a thread.
    """
    if dtype == "f32":
        if at.regime.many:
            return Tile(64, 64, 32, 4, 3)
        return Tile(few_rows(at), *((32, 64, 2, 5) if outputs >= 8192 else (16, 64, 1, 6)))
    if at.regime.many:
        return Tile(128, 128, 32, 8, 4) if outputs >= 4096 else Tile(64, 128, 32, 4, 4)
    if outputs >= 8192 or columns <= 512:
        k = min(256, max(32, next_power_of_2(columns)))
        return Tile(few_rows(at), 32, k, 2, 3)
    return Tile(few_rows(at), 16, 512, 1, 3)


def lower_linear(at: Lowering, node: Node) -> None:
    x, weight = at.view(node.inputs[0]), at.constant(node.inputs[1])
    outputs, columns = weight.shape
    y = at.new(node.outputs[0], "f32", x.rows, outputs)
    pointers: Arguments = {
        "x": at.pointer(x),
        "weight": at.pointer(weight),
        "y": at.pointer(y),
        "M": at.size(x.rows),
    }
    tile = float_tile(at, weight.dtype, outputs, columns)
    constants = {"N": outputs, "K": columns, "X_STRIDE": x.stride}
    launch_product(at, "linear", pointers, constants, tile, x.rows)


LOWER: dict[str, Lower] = {"Linear": lower_linear}
