"""How `kernels.rope` is called: Rope, and the append that comes before attention.

A Rope node launches nothing: its node waits in `Lowering.waiting` for the Attention node that reads
it, whose first launch rotates q and k and puts k and v into the caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.lowering.context import Lower, Lowering, Node, View, cdiv, next_power_of_2
from edge.plugins.lowering.norm import warps_for

_HEADS = 8


@dataclass(frozen=True)
class Heads:
    """q, k or v of an Attention node before rotation, rows of `heads` heads.

    Attributes:
        tables: names of the inputs cos and sin, f32 [T, dim/2]; none when it is not rotated.
        dim: values of each head that are rotated.
    """

    view: View
    tables: tuple[str, ...] = ()
    dim: int = 0


def lower_rope(at: Lowering, node: Node) -> None:
    """Leave the rotation to the reader."""
    if node.inputs[0] not in at.views:
        raise ExportError("rotates what no kernel makes", field=node.name)
    at.waiting[node.outputs[0]] = node


def heads_of(at: Lowering, name: str) -> Heads:
    """The value `name`, whether a Rope node makes it or not."""
    node = at.waiting.get(name)
    if node is None:
        return Heads(at.view(name))
    return Heads(at.view(node.inputs[0]), tuple(node.inputs[1:3]), int(node.attributes["dim"]))


def append(at: Lowering, node: Node) -> View:
    """Put k and v of the Attention `node` into its caches, slots PAST…; returns q, rotated.

    One launch: a program takes up to 8 heads of q, k or v of one row, 32 values a head and lane.
    """
    q, k, v = (heads_of(at, name) for name in node.inputs[:3])
    if v.tables or q.tables != k.tables or q.dim != k.dim:
        raise ExportError("q and k are not rotated alike, or v is", field=node.name)
    kv, p = (int(node.attributes[name]) for name in ("kv_heads", "head_dim"))
    heads = int(node.attributes["heads"]) if q.dim else 0
    turned = at.new(f"{node.outputs[0]}.q", "f32", k.view.rows, heads * p) if q.dim else None
    table = Size(times=q.dim // 2, of="T")
    tables = [at.input(name, "f32", table) for name in q.tables]
    block = min(_HEADS, next_power_of_2(max(heads, kv)))
    wide = next_power_of_2(p)
    at.launch(
        "rope.append",
        {
            "q": at.pointer(q.view) if q.dim else None,
            "k": at.pointer(k.view),
            "v": at.pointer(v.view),
            "cos": tables[0] if tables else None,
            "sin": tables[1] if tables else None,
            "run": at.run(),
            "turned": at.pointer(turned),
            "keys": at.cache(node.inputs[3]),
            "values": at.cache(node.inputs[4]),
            "B": at.size("B"),
            "C": at.size("C"),
        },
        {
            "HEADS": heads,
            "KV": kv,
            "P": p,
            "DIM": q.dim,
            "Q_STRIDE": q.view.stride,
            "K_STRIDE": k.view.stride,
            "V_STRIDE": v.view.stride,
            "BLOCK_H": block,
            "BLOCK_P": wide,
        },
        (Size(of=k.view.rows), Size(times=cdiv(heads, block) + 2 * cdiv(kv, block))),
        warps=warps_for(block * wide),
    )
    return q.view if turned is None else turned


LOWER: dict[str, Lower] = {"Rope": lower_rope}
