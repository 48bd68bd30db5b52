"""Lowering of products, and the tile that each program computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge.launch import Size
from edge.plugins.lowering.context import (
    ONE,
    Arguments,
    Lowering,
    Node,
    Rows,
    View,
    Warps,
    cdiv,
    next_power_of_2,
)
from edge.plugins.lowering.fuse import Pair

PAIRS = tuple(
    Pair(f"{first}Quantize", first, "Quantize", through=("x",), second_names={"scale": "y_scale"})
    for first in ("LinearInt8", "LinearInt4", "LinearInt4Minimum")
)


@dataclass(frozen=True)
class Tile:
    """The part of x [rows, K] · weight [N, K]ᵀ that one program computes.

    Attributes:
        m: rows; for `few` kernels the maximum of the run, 8 or 16.
        n, k: outputs, and columns per step.
        warps, stages: `num_warps`, `num_stages`; stages - 1 steps are in flight from memory.
        split: parts of the columns that warps sum in parallel, for kernels that support it.
    """

    m: int
    n: int
    k: int
    warps: Warps
    stages: int
    split: int = 1

    @property
    def many(self) -> bool:
        return self.m > 16

    @property
    def blocks(self) -> dict[str, int]:
        """The tile's sizes as constants of the kernel."""
        rows = "BLOCK_M" if self.many else "ROWS"
        return {rows: self.m, "BLOCK_N": self.n, "BLOCK_K": self.k}


def few_rows(at: Lowering) -> int:
    """Return the rows of a `few` kernel's tile."""
    return 8 if at.regime.max_rows == 1 else 16


def launch_product(
    at: Lowering,
    file: str,
    pointers: Arguments,
    constants: Mapping[str, int],
    tile: Tile,
    rows: Rows,
    *,
    settles: bool = False,
) -> None:
    """Launch `few` or `many` of a kernel file, depending on the tile. `constants` includes N."""
    outputs = Size(times=cdiv(constants["N"], tile.n))
    at.launch(
        f"{file}.{'many' if tile.many else 'few'}",
        pointers,
        {**constants, **tile.blocks},
        # neighbouring programs share their weights
        (Size(of=rows, per=tile.m) if tile.many else ONE, outputs),
        warps=tile.warps,
        stages=tile.stages,
        settles=settles,
    )


def _product(
    at: Lowering,
    node: Node,
    kernel: str,
    names: tuple[str, ...],
    shape: tuple[int, int],
    tile: Tile,
    constants: Mapping[str, int],
    trailing: tuple[str, ...] = (),
) -> None:
    """Launch x [rows, K] · weightᵀ, for a weight of `shape` [N, K].

    `names` are inputs in the kernel's order, `trailing` inputs that it takes after all others.
    """
    x = at.view(node.inputs["x"])
    y = at.new(node.outputs["y"], "i8" if "y_scale" in node.inputs else "f32", x.rows, shape[0])
    pointers = {**at.given(node, *names), "y": at.pointer(y), "M": at.size(x.rows)}
    pointers |= at.given(node, *trailing)
    sizes = {"N": shape[0], "K": shape[1], "X_STRIDE": x.stride}
    launch_product(at, kernel, pointers, {**sizes, **constants}, tile, x.rows)


# -- fp32 and fp16 weights -------------------------------------------------------------------------


def float_tile(at: Lowering, dtype: str, outputs: int, columns: int) -> Tile:
    """Return the tile for weights of 2 or 4 bytes and x of 4, chosen as in `int8_tile`.

    8 rows of x take as much shared memory as 16 outputs of fp16 weights, so steps are half as long.
    fp32 weights are split into two tf32 parts in registers, which 64 columns fill, so steps are
    shorter and more numerous. Large products of 64 and of 128 rows take 126 registers a thread.
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
    weight = at.constant(node.inputs["weight"])
    outputs, columns = weight.shape
    tile = float_tile(at, weight.dtype, outputs, columns)
    _product(at, node, "linear", ("x", "weight"), (outputs, columns), tile, {})


# -- int8 weights ----------------------------------------------------------------------------------


def int8_tile(at: Lowering, outputs: int, columns: int) -> Tile:
    """Return the tile for x i8 [rows, columns] · weight i8 [outputs, columns]ᵀ.

    At most 16 rows: reading the weights takes all the time. With a bandwidth of 4.8 TB/s and a
    latency of about 0.7 µs, 132 SMs need 25 KB in flight each (an Orin's 8, with 102 GB/s, 10 KB).
    A program has (stages - 1)·n·k bytes in flight. Shared memory, which holds these and the same
    columns of 8 or 16 rows of x, limits the programs per SM. 16 outputs are a warp's product.
    in_proj's 10240 outputs by 32 are 320 programs, 2.4 per SM with 48 KB each (with one stage less,
    an H100 took 6 % longer, and 14 % for the head); fewer outputs per program would read x from L2
    too often. With few outputs (out_proj: 2560, 160 programs by 16), each program has 48 KB in
    flight, in 72 or 96 KB, the maximum of sm_86, sm_89 and sm_120.

    More rows: warps divide consecutive products along the longer side, so 64 x 128 on 4 warps reads
    shared memory least often. 128 registers a thread allow 4 programs per SM, shared memory of 48
    to 72 KB allows 2 or 3.
    """
    if at.regime.many:
        return Tile(64, 128, 128, 4, 3)
    rows = few_rows(at)
    if columns <= 512:
        return Tile(rows, 32, max(64, next_power_of_2(columns)), 2, 2)
    if outputs >= 8192:
        return Tile(rows, 32, 512, 2, 4)
    # Few outputs are few programs, so warps sum four parts of the columns in parallel. Each part
    # consists of whole 16-byte loads.
    if outputs <= 512 and columns % 64 == 0:
        return Tile(rows, 16, 1024, 2, 4, split=4)
    return Tile(rows, 16, 1024, 1, 4)


def lower_linear_int8(at: Lowering, node: Node) -> None:
    """Lower the int8 products. x_scale is a value, one per row, for LinearInt8Rows."""
    outputs, columns = at.constant(node.inputs["weight"]).shape
    tile = int8_tile(at, outputs, columns)
    x_scale = at.views.get(node.inputs["x_scale"])
    constants = {
        "X_SCALE_STEP": 0 if x_scale is None else x_scale.stride,
        "WEIGHT_SCALE_STEP": int(at.count(node, "weight_scale") > 1),
        "Y_SCALE_STEP": int(at.count(node, "y_scale") > 1),
        **({"SPLIT": tile.split} if tile.split > 1 else {}),
    }
    names = ("x", "x_scale", "weight", "weight_scale", "y_scale")
    _product(at, node, "linear_int8", names, (outputs, columns), tile, constants)


lower_linear_int8_quantize = lower_linear_int8_rows = lower_linear_int8


# -- weights in blocks of 4 or 8 bits --------------------------------------------------------------

# An fp32 tile of this width and 64 rows is 16 KB; shared memory holds three of them, and weights.
_MAX_PIECE = 64
# fewer outputs than this are too few programs of 8 or 16
_FEW_OUTPUTS = 1024


def _blocks_tile(
    at: Lowering, outputs: int, columns: int, shared: int, *, least: int, step: int, wide: int
) -> tuple[Tile, dict[str, int]]:
    """Return the tile and constants for weights in blocks of `shared` columns.

    `least` is the minimum number of columns of a product, `step` the columns per step of few rows,
    `wide` the outputs of a tile of many.

    At most 16 rows: as in `int8_tile`, but a product can sum only one block exactly, so a step is
    several blocks. Unpacking is most of the work, so six programs or more should share an SM: two
    steps of four blocks in flight take 12 to 24 KB of shared memory.

    More rows: the fp32 sums and the block's sums take 32 registers a thread each for 64 x 64.
    Splitting x into even and odd columns is work for every program, so tiles of 4-bit weights are
    twice as wide.
    """
    k = max(least, next_power_of_2(shared))
    if at.regime.many:
        return Tile(64, wide, k, 4, 3), {"STAGES": 3}
    tile = Tile(16, 32, k, 2, 3) if outputs >= 8192 else Tile(16, 16, k, 1, 3)
    blocks = columns // shared
    limit = max(1, min(4, step // k))
    unroll = max(count for count in range(1, limit + 1) if blocks % count == 0)
    return tile, {"UNROLL": unroll, "STAGES": tile.stages}


def _alone(at: Lowering, node: Node, warps: Warps, *, unit: int = 2) -> dict[str, int]:
    """Return the constants for threads that multiply alone: see `rows_by_blocks`."""
    shared = node.attributes["block_size"]
    nbytes = shared * node.attributes.get("bits", 4) // 8
    word = next(size for size in (4, 2, 1) if nbytes % size == 0)
    words = nbytes // word
    if word < 4 or words % unit:
        unit = 1
    units = next_power_of_2(words // unit)
    return {
        "WORD": word,
        "WORDS": units * unit,
        "UNIT": unit,
        "BLOCKS": max(1, 32 * warps // units),
        "ALIGNED": at.view(node.inputs["x"]).aligned,
    }


def _one_row(
    at: Lowering, node: Node, kernel: str, names: tuple[str, ...], constants: Mapping[str, int]
) -> None:
    """Launch the product of a step of one sequence.

    A thread reads 8 bytes of codes of each of 8 outputs, and the columns of x for all of them. Of
    the tiles tried on an H200, with all its multiprocessors and with eight, these took at most 1.13
    times as long as the fastest for 2,560 and 10,240 outputs. Few outputs need more programs, and
    fewer steps, because each waits for memory.
    """
    outputs, columns, shared = (node.attributes[name] for name in ("N", "K", "block_size"))
    warps: Warps = 1 if outputs >= 8192 else 2
    tile = {"BLOCK_N": 8, **_alone(at, node, warps)}
    if outputs < _FEW_OUTPUTS:
        warps = 4
        tile = {"BLOCK_N": 2, **_alone(at, node, warps, unit=1)}
    x = at.view(node.inputs["x"])
    y = at.new(node.outputs["y"], "i8" if "y_scale" in node.inputs else "f32", x.rows, outputs)
    pointers = {**at.given(node, *names), "y": at.pointer(y), "M": at.size(x.rows)}
    at.launch(
        f"{kernel}.one",
        {**pointers, **at.given(node, *_trailing_inputs(node))},
        {"N": outputs, "K": columns, "X_STRIDE": x.stride, **constants, "SHARED": shared, **tile},
        (ONE, Size(times=cdiv(outputs, tile["BLOCK_N"]))),
        warps=warps,
        stages=1,
    )


def _few_alone(at: Lowering, node: Node, tile: Tile, bits: int) -> tuple[Tile, dict[str, int]]:
    """Return the tile of `few` and its constants for rows whose threads multiply alone.

    On an H200, tensor cores took less time for any number of rows, or as much, except for up to 4
    rows of fp32 times 4 bits on eight multiprocessors. Without the code for threads alone, the
    kernel for 8 bits takes less than half the registers, too. With few outputs there would be too
    few programs of 16 outputs. With 16 columns of fp32 x a thread, not 8, two warps took 1.35 times
    as long on eight multiprocessors.
    """
    if node.attributes["N"] < _FEW_OUTPUTS:
        tile = Tile(tile.m, 2, tile.k, 4, tile.stages)
        return tile, {"ALONE": tile.m, **_alone(at, node, tile.warps, unit=1)}
    if bits == 8 or at.view(node.inputs["x"]).dtype != "f32":
        return tile, {}
    unit = 1 if tile.warps == 2 else 2
    return tile, {"ALONE": 4, **_alone(at, node, tile.warps, unit=unit)}


def _paired(x: View) -> bool:
    """Return whether rows start on multiples of two elements."""
    return x.offset % 2 == 0 and x.stride % 2 == 0


def _trailing_inputs(node: Node) -> tuple[str, ...]:
    return ("minimums",) if "minimums" in node.inputs else ()


def lower_linear_int4(at: Lowering, node: Node) -> None:
    outputs, columns, shared = (node.attributes[name] for name in ("N", "K", "block_size"))
    names = ("x", "x_scale", "packed", "scales", "y_scale")
    scaled = {"Y_SCALE_STEP": int(at.count(node, "y_scale") > 1)}
    if at.regime.max_rows == 1:
        _one_row(at, node, "linear_int4", names, scaled)
        return
    tile, steps = _blocks_tile(at, outputs, columns, shared, least=64, step=512, wide=128)
    if not tile.many:
        tile, alone = _few_alone(at, node, tile, 4)
        steps |= alone
    constants = {
        **scaled,
        "SHARED": shared,
        "PAIRED": _paired(at.view(node.inputs["x"])),
        **steps,
    }
    _product(
        at, node, "linear_int4", names, (outputs, columns), tile, constants, _trailing_inputs(node)
    )


lower_linear_int4_quantize = lower_linear_int4
lower_linear_int4_minimum = lower_linear_int4_minimum_quantize = lower_linear_int4


def lower_linear_bits(at: Lowering, node: Node) -> None:
    """Lower the products of fp32 x. For few rows a step is 256 columns, because x takes 4 bytes
    each.
    """
    outputs, columns, shared = (node.attributes[name] for name in ("N", "K", "block_size"))
    bits = node.attributes["bits"]
    names = ("x", "packed", "scales")
    if at.regime.max_rows == 1:
        _one_row(at, node, "linear_bits", names, {"BITS": bits})
        return
    least = 16 * 8 // bits
    wide = 128 if bits == 4 else 64
    tile, steps = _blocks_tile(at, outputs, columns, shared, least=least, step=256, wide=wide)
    if not tile.many:
        tile, alone = _few_alone(at, node, tile, bits)
        steps |= alone
    else:
        piece = shared
        while piece > _MAX_PIECE and piece % 4 == 0:
            piece //= 2
        width = max(least, next_power_of_2(piece))
        steps |= {"PIECE": piece}
        if bits == 4:
            steps |= {"PIECES": max(1, _MAX_PIECE // width) if piece == shared else 1}
        tile = Tile(tile.m, tile.n, width, tile.warps, tile.stages)
    constants = {
        "BITS": bits,
        "SHARED": shared,
        "PAIRED": _paired(at.view(node.inputs["x"])),
        **steps,
    }
    _product(
        at, node, "linear_bits", names, (outputs, columns), tile, constants, _trailing_inputs(node)
    )


lower_linear_bits_minimum = lower_linear_bits
