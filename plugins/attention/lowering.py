"""Lowering to the kernels of `rope` and `attention`: append, attend and, in a step, join.

RoPE has no launch of its own: the first launch rotates q and k, and writes k and v to the caches. A
step and a chunk, or steps after different numbers of slots, sum in different orders: their results
agree to about 10⁻⁶ of the values, not bit for bit. A tree of one branch gives the bits of the
chain.
"""

from __future__ import annotations

from typing import NamedTuple

from edge.errors import ExportError
from edge.launch import DType, Pointer, Size
from edge.plugins.lowering.context import Lowering, Node, View, cdiv, next_power_of_2, warps_for
from edge.plugins.lowering.fuse import Pair

PAIRS = tuple(
    Pair(f"Rotary{name}", "Rope", name, through=("q", "k"))
    for name in ("Attention", "AttentionF16")
)

# Programs to split the slots of one sequence into, to use all SMs: an H200 has 132.
_PROGRAMS = 128
_HEADS = 8


def lower_attention(at: Lowering, node: Node) -> None:
    """Launch y = softmax(scale · q·Kᵀ)·V over all slots that a token may attend to."""
    q = append(at, node)
    heads, kv, p = (int(node.attributes[name]) for name in ("heads", "kv_heads", "head_dim"))
    if heads % kv or q.width != heads * p:
        raise ExportError(f"{heads} heads of {p} do not fit q or {kv} KV heads", field=node.name)
    y = at.new(node.outputs["y"], "f32", q.rows, q.width)
    _attend(at, node, q, y, heads // kv)


lower_attention_f16 = lower_rotary_attention = lower_rotary_attention_f16 = lower_attention


def _caches(at: Lowering, node: Node) -> dict[str, tuple[Pointer, str]]:
    dtype: DType = "f16" if node.op.endswith("F16") else "f32"
    names = {"keys": "key_cache", "values": "value_cache"}
    return {name: at.cache(node.inputs[cache], dtype) for name, cache in names.items()}


def append(at: Lowering, node: Node) -> View:
    """Write k and v of the Attention `node` to its caches, from slot PAST on; return q, rotated.

    This is one launch. A program takes up to 8 heads of q, k or v of one row, 32 values a head and
    lane.
    """
    q, k, v = (at.view(node.inputs[name]) for name in ("q", "k", "v"))
    dim = int(node.attributes.get("dim", 0))
    kv, p = (int(node.attributes[name]) for name in ("kv_heads", "head_dim"))
    heads = int(node.attributes["heads"]) if dim else 0
    rotated = at.new(f"{node.outputs['y']}.q", "f32", k.rows, heads * p) if dim else None
    table = Size(times=dim // 2, of="T")
    tables = [at.input(node.inputs[name], "f32", table) for name in ("cos", "sin") if dim]
    block = min(_HEADS, next_power_of_2(max(heads, kv)))
    block_p = next_power_of_2(p)
    at.launch(
        "rope.append",
        {
            "q": at.pointer(q) if dim else None,
            "k": at.pointer(k),
            "v": at.pointer(v),
            "cos": tables[0] if dim else None,
            "sin": tables[1] if dim else None,
            "run": at.run(),
            "turned": at.pointer(rotated),
            **_caches(at, node),
            "B": at.size("B"),
            "C": at.size("C"),
        },
        {
            "HEADS": heads,
            "KV": kv,
            "P": p,
            "DIM": dim,
            "Q_STRIDE": q.stride,
            "K_STRIDE": k.stride,
            "V_STRIDE": v.stride,
            "BLOCK_H": block,
            "BLOCK_P": block_p,
        },
        (Size(of=k.rows), Size(times=cdiv(heads, block) + 2 * cdiv(kv, block))),
        warps=warps_for(block * block_p),
    )
    return q if rotated is None else rotated


class _Tiles(NamedTuple):
    """The tiling of a launch of `attend`.

    Attributes:
        splits: number of parts of the slots, one program each.
        rows: queries per program.
        slots: slots per tile.
        wide: columns per tile, a power of two.
        stages: number of tiles in flight or in use.
    """

    splits: int
    rows: int
    slots: int
    wide: int
    stages: int


def _tiles(at: Lowering, kv: int, group: int, p: int) -> _Tiles:
    """Choose the tiling.

    A step splits the slots: reading them is its cost, and one token of 8 KV heads would otherwise
    use 8 SMs. Tiles of keys and of values are 16 KB each. A step has two of both in flight and one
    in use, at most 90 KB of shared memory, which every architecture from sm_86 has. Queries are
    held as two tf32 parts per value: 16 rows of 128 take 128 registers a thread, and more rows
    would not fit.
    """
    wide = max(16, next_power_of_2(p))
    if at.regime.many:
        rows = min(max(2048 // wide, 16), 64)
        return _Tiles(1, rows, min(max(4096 // wide, 16), 32), wide, 2)
    rows = 1 if at.regime.max_rows == 1 and group == 1 else 16
    splits = min(max(next_power_of_2(cdiv(_PROGRAMS, kv)), 4), 16)
    return _Tiles(splits, rows, min(max(4096 // wide, 16), 64), wide, 2 if wide > 128 else 3)


def _attend(at: Lowering, node: Node, q: View, y: View, group: int) -> None:
    """Launch attention, with one read of the caches for all queries of a KV head. A second launch
    joins the parts of the slots.
    """
    kv, p = int(node.attributes["kv_heads"]), int(node.attributes["head_dim"])
    tiles = _tiles(at, kv, group, p)
    window, softcap = int(node.attributes["window"]), float(node.attributes["softcap"])
    windowed = {"WINDOW": window} if window else {}
    mixes = peaks = None
    if tiles.splits > 1:
        parts = y.width // p * tiles.splits
        mixes = at.new(f"{y.buffer}.mixes", "f32", y.rows, parts * p)
        peaks = at.new(f"{y.buffer}.peaks", "f32", y.rows, parts * 2)
    at.launch(
        "attention.attend",
        {
            "q": at.pointer(q),
            **_caches(at, node),
            "ancestors": at.ancestors() if at.regime.kind == "tree" else None,
            "run": at.run(),
            "y": at.pointer(y) if mixes is None else None,
            "mixes": at.pointer(mixes),
            "peaks": at.pointer(peaks),
            "T": at.size("T"),
            "B": at.size("B"),
            "C": at.size("C"),
        },
        {
            "KV": kv,
            "GROUP": group,
            "P": p,
            "Q_STRIDE": q.stride,
            "SCALE": float(node.attributes["scale"]),
            "SPLITS": tiles.splits,
            "BLOCK_R": tiles.rows,
            "BLOCK_N": tiles.slots,
            "BLOCK_P": tiles.wide,
            "STAGES": tiles.stages,
            **windowed,
            **({"SOFTCAP": softcap} if softcap else {}),
        },
        (
            Size(times=group, of="T", per=tiles.rows),
            Size(times=kv, of="B"),
            Size(times=tiles.splits),
        ),
        warps=4 if tiles.wide <= 128 else 8,
        stages=tiles.stages,
    )
    if mixes is not None and peaks is not None:
        _join(at, mixes, peaks, y, tiles, p, windowed)


def _join(
    at: Lowering, mixes: View, peaks: View, y: View, tiles: _Tiles, p: int, windowed: dict[str, int]
) -> None:
    at.launch(
        "attention.join",
        {
            "mixes": at.pointer(mixes),
            "peaks": at.pointer(peaks),
            "run": at.run(),
            "y": at.pointer(y),
            "T": at.size("T"),
        },
        {
            "HEADS": y.width // p,
            "P": p,
            "SPLITS": tiles.splits,
            "BLOCK_N": tiles.slots,
            "BLOCK_P": tiles.wide,
            **windowed,
        },
        (Size(of=y.rows), Size(times=y.width // p)),
        warps=4,
    )
