"""How `rope` and `attention` are called: append, attend and, in a step, join.

A rotation is no launch of its own: the first launch rotates q and k and puts k and v into the
caches. A step and a chunk, or a step after another number of slots, add up in another order: their
results agree to about 10⁻⁶ of the values, not to the bit. A tree of one branch has the bits of the
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

# Programs that the slots of one sequence should keep busy: an H200 has 132 SMs.
_PROGRAMS = 128
_HEADS = 8


def lower_attention(at: Lowering, node: Node) -> None:
    """y = softmax(scale · q·Kᵀ)·V over all slots a token may see."""
    q = append(at, node)
    heads, kv, p = (int(node.attributes[name]) for name in ("heads", "kv_heads", "head_dim"))
    if heads % kv or q.width != heads * p:
        raise ExportError(f"{heads} heads of {p} over {kv} of keys", field=node.name)
    y = at.new(node.outputs["y"], "f32", q.rows, q.width)
    _attend(at, node, q, y, heads // kv)


lower_attention_f16 = lower_rotary_attention = lower_rotary_attention_f16 = lower_attention


def _caches(at: Lowering, node: Node) -> dict[str, tuple[Pointer, str]]:
    dtype: DType = "f16" if node.op.endswith("F16") else "f32"
    names = {"keys": "key_cache", "values": "value_cache"}
    return {name: at.cache(node.inputs[cache], dtype) for name, cache in names.items()}


def append(at: Lowering, node: Node) -> View:
    """Put k and v of the Attention `node` into its caches, slots PAST…; returns q, rotated.

    One launch: a program takes up to 8 heads of q, k or v of one row, 32 values a head and lane.
    """
    q, k, v = (at.view(node.inputs[name]) for name in ("q", "k", "v"))
    dim = int(node.attributes.get("dim", 0))
    kv, p = (int(node.attributes[name]) for name in ("kv_heads", "head_dim"))
    heads = int(node.attributes["heads"]) if dim else 0
    turned = at.new(f"{node.outputs['y']}.q", "f32", k.rows, heads * p) if dim else None
    table = Size(times=dim // 2, of="T")
    tables = [at.input(node.inputs[name], "f32", table) for name in ("cos", "sin") if dim]
    block = min(_HEADS, next_power_of_2(max(heads, kv)))
    wide = next_power_of_2(p)
    at.launch(
        "rope.append",
        {
            "q": at.pointer(q) if dim else None,
            "k": at.pointer(k),
            "v": at.pointer(v),
            "cos": tables[0] if dim else None,
            "sin": tables[1] if dim else None,
            "run": at.run(),
            "turned": at.pointer(turned),
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
            "BLOCK_P": wide,
        },
        (Size(of=k.rows), Size(times=cdiv(heads, block) + 2 * cdiv(kv, block))),
        warps=warps_for(block * wide),
    )
    return q if turned is None else turned


class _Tiles(NamedTuple):
    """How a launch of `attend` is cut.

    Attributes:
        splits: parts of the slots, each for a program.
        rows: queries of a program.
        slots: of a tile.
        wide: columns, a power of two.
        stages: tiles in flight, and the one in use.
    """

    splits: int
    rows: int
    slots: int
    wide: int
    stages: int


def _tiles(at: Lowering, kv: int, group: int, p: int) -> _Tiles:
    """A step splits the slots: reading them is its cost, and one token of 8 KV heads would keep 8
    SMs busy. A tile of keys and one of values are 16 KB each; a step has two of both in flight
    beside the one in use, 90 KB of shared memory at most, which every architecture from sm_86 has.
    Queries are held as the two tf32 parts of each value: 16 rows of 128 are 128 registers a thread,
    and more of them would not fit.
    """
    wide = max(16, next_power_of_2(p))
    if at.regime.many:
        rows = min(max(2048 // wide, 16), 64)
        return _Tiles(1, rows, min(max(4096 // wide, 16), 32), wide, 2)
    rows = 1 if at.regime.max_rows == 1 and group == 1 else 16
    splits = min(max(next_power_of_2(cdiv(_PROGRAMS, kv)), 4), 16)
    return _Tiles(splits, rows, min(max(4096 // wide, 16), 64), wide, 2 if wide > 128 else 3)


def _attend(at: Lowering, node: Node, q: View, y: View, group: int) -> None:
    """The queries of one KV head share what is read of the caches. Parts of the slots are joined by
    a second launch.
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
