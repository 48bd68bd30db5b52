"""How `kernels.linear_int4` is called: LinearInt4 and LinearInt4Quantize."""

from __future__ import annotations

from edge.plugins.lowering.context import Arguments, Lower, Lowering, Node, View, next_power_of_2
from edge.plugins.lowering.tiles import Tile, few_rows, launch_product


def blocks_tile(
    at: Lowering, outputs: int, columns: int, shared: int, *, least: int, step: int
) -> tuple[Tile, dict[str, int]]:
    """For weights in blocks of `shared` columns, a product of which takes `least` at once.

    At most 16 rows: as in `int8_tile`, but a block is all that a product can sum exactly, so a step
    is several blocks, `step` columns. Taking the nibbles apart costs some 200 instructions a KB of
    weights, an SM's issue slots for 50 cycles: an Orin's SM is given one KB in 80, an H200's in 49.

    More rows: the fp32 sums stand beside the block's, 32 registers a thread each for 64 x 64.
    """
    k = max(least, next_power_of_2(shared))
    if at.regime.many:
        return Tile(64, 64, k, 4, 3), {"STAGES": 3}
    rows = few_rows(at)
    tile = Tile(rows, 32, k, 2, 4)
    if outputs < 8192:
        tile = Tile(rows, 16, k, 1, 6 if rows == 8 else 4)
    blocks = columns // shared
    most = max(1, min(8, step // k))
    unroll = max(count for count in range(1, most + 1) if blocks % count == 0)
    return tile, {"UNROLL": unroll, "STAGES": tile.stages}


def paired(x: View, least: int) -> bool:
    """Whether rows start on multiples of `least` elements."""
    return x.offset % least == 0 and x.stride % least == 0


def lower_linear_int4(at: Lowering, node: Node) -> None:
    """x, x_scale, packed, scales and, to round, y_scale."""
    x, packed, scales = at.view(node.inputs[0]), *map(at.constant, node.inputs[2:4])
    y_scale = at.constant(node.inputs[4]) if len(node.inputs) > 4 else None
    outputs, columns = node.attributes["N"], node.attributes["K"]
    shared = node.attributes["block_size"]
    y = at.new(node.outputs[0], "f32" if y_scale is None else "i8", x.rows, outputs)
    tile, steps = blocks_tile(at, outputs, columns, shared, least=64, step=512)
    pointers: Arguments = {
        "x": at.pointer(x),
        "x_scale": at.pointer(at.constant(node.inputs[1])),
        "packed": at.pointer(packed),
        "scales": at.pointer(scales),
        "y_scale": at.pointer(y_scale),
        "y": at.pointer(y),
        "M": at.size(x.rows),
    }
    constants = {
        "N": outputs,
        "K": columns,
        "X_STRIDE": x.stride,
        "Y_SCALE_STEP": int(y_scale is not None and y_scale.size > 1),
        "SHARED": shared,
        "PAIRED": paired(x, 2),
        **steps,
    }
    launch_product(at, "linear_int4", pointers, constants, tile, x.rows)


LOWER: dict[str, Lower] = dict.fromkeys(("LinearInt4", "LinearInt4Quantize"), lower_linear_int4)
