"""How `kernels.linear_int8` is called: LinearInt8, LinearInt8Quantize and LinearInt8Rows."""

from __future__ import annotations

from edge.plugins.lowering.context import (
    Arguments,
    Constant,
    Lower,
    Lowering,
    Node,
    View,
    next_power_of_2,
)
from edge.plugins.lowering.tiles import Tile, few_rows, launch_product


def int8_tile(at: Lowering, outputs: int, columns: int) -> Tile:
    """For x i8 [rows, columns] · weight i8 [outputs, columns]ᵀ.

    At most 16 rows: reading the weights is all the time there is. A memory of 4.8 TB/s answers
    after about 0.7 µs, so 132 SMs must have 25 KB each on their way (an Orin's 8, of 102 GB/s,
    10 KB). A program has (stages - 1)·n·k bytes, an SM as many programs as fit its shared memory,
    which holds those and the like of 8 or 16 rows of x. 16 outputs are a warp's product. in_proj's
    10240 outputs by 32 are 320 programs, 2.4 an SM of 48 KB each (with a stage less an H100 took
    6 % longer, and 14 % for the head); fewer outputs a program would read x from L2 too often.
    Where there are few (out_proj, 2560 outputs, 160 programs by 16) each has 48 KB on its way, in
    72 or 96 KB, the most that sm_86, sm_89 and sm_120 give.

    More rows: products that follow one another are shared by warps along the longer side, so 64 x
    128 on 4 warps reads shared memory as seldom as can be. 128 registers a thread: 4 programs an
    SM by registers, 2 or 3 by their shared memory of 48 to 72 KB.
    """
    if at.regime.many:
        return Tile(64, 128, 128, 4, 3)
    rows = few_rows(at)
    if columns <= 512:
        return Tile(rows, 32, max(64, next_power_of_2(columns)), 2, 2)
    if outputs >= 8192:
        return Tile(rows, 32, 512, 2, 4)
    # few outputs, few programs: four parts of the columns side by side, each of whole loads of 16
    if outputs <= 512 and columns % 64 == 0:
        return Tile(rows, 16, 1024, 2, 4, split=4)
    return Tile(rows, 16, 1024, 1, 4)


def lower_linear_int8(at: Lowering, node: Node) -> None:
    """x, x_scale, weight, weight_scale and, to round, y_scale; x_scale is a value for Rows."""
    x, weight = at.view(node.inputs[0]), at.constant(node.inputs[2])
    outputs, columns = weight.shape
    x_scale: View | Constant
    if node.op == "LinearInt8Rows":
        x_scale = at.view(node.inputs[1])
        step = x_scale.stride
    else:
        x_scale, step = at.constant(node.inputs[1]), 0
    weight_scale = at.constant(node.inputs[3])
    y_scale = at.constant(node.inputs[4]) if len(node.inputs) > 4 else None
    y = at.new(node.outputs[0], "f32" if y_scale is None else "i8", x.rows, outputs)
    tile = int8_tile(at, outputs, columns)
    pointers: Arguments = {
        "x": at.pointer(x),
        "x_scale": at.pointer(x_scale),
        "weight": at.pointer(weight),
        "weight_scale": at.pointer(weight_scale),
        "y_scale": at.pointer(y_scale),
        "y": at.pointer(y),
        "M": at.size(x.rows),
    }
    launch_product(
        at,
        "linear_int8",
        pointers,
        {
            "N": outputs,
            "K": columns,
            "X_STRIDE": x.stride,
            "X_SCALE_STEP": step,
            "WEIGHT_SCALE_STEP": int(weight_scale.size > 1),
            "Y_SCALE_STEP": int(y_scale is not None and y_scale.size > 1),
            **({"SPLIT": tile.split} if tile.split > 1 else {}),
        },
        tile,
        x.rows,
    )


LOWER: dict[str, Lower] = dict.fromkeys(
    ("LinearInt8", "LinearInt8Quantize", "LinearInt8Rows"), lower_linear_int8
)
