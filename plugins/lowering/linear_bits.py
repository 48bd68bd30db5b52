"""How `kernels.linear_bits` is called: LinearBits, of 8 or 4 bits."""

from __future__ import annotations

from edge.plugins.lowering.context import Arguments, Lower, Lowering, Node, next_power_of_2
from edge.plugins.lowering.linear_int4 import blocks_tile, paired
from edge.plugins.lowering.tiles import Tile, launch_product

# An fp32 tile of this width and 64 rows is 16 KB: three of them, and weights, are in shared memory.
_WIDEST = 64


def lower_linear_bits(at: Lowering, node: Node) -> None:
    """x, packed and scales. A step is 256 columns, because x takes 4 bytes each."""
    x, packed, scales = at.view(node.inputs[0]), *map(at.constant, node.inputs[1:3])
    outputs, columns = node.attributes["N"], node.attributes["K"]
    bits, shared = node.attributes["bits"], node.attributes["block_size"]
    least = 16 * 8 // bits
    tile, steps = blocks_tile(at, outputs, columns, shared, least=least, step=256)
    if tile.many:
        piece = shared
        while piece > _WIDEST and piece % 4 == 0:
            piece //= 2
        steps |= {"PIECE": piece}
        tile = Tile(tile.m, tile.n, max(least, next_power_of_2(piece)), tile.warps, tile.stages)
    pointers: Arguments = {
        "x": at.pointer(x),
        "packed": at.pointer(packed),
        "scales": at.pointer(scales),
        "y": at.pointer(at.new(node.outputs[0], "f32", x.rows, outputs)),
        "M": at.size(x.rows),
    }
    constants = {
        "N": outputs,
        "K": columns,
        "X_STRIDE": x.stride,
        "BITS": bits,
        "SHARED": shared,
        "PAIRED": paired(x, 2),
        **steps,
    }
    launch_product(at, "linear_bits", pointers, constants, tile, x.rows)


LOWER: dict[str, Lower] = {"LinearBits": lower_linear_bits}
