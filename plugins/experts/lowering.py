"""Lowering of routing, products with the chosen experts and their sum.

Each program of a product has one expert. It finds the expert's rows and exits at once if there are
none, so only weights of chosen experts are read, once per tile of rows.
"""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import (
    ONE,
    Lowering,
    Node,
    View,
    Warps,
    cdiv,
    next_power_of_2,
    warps_for,
)

_BLOCK = 512


def lower_route(at: Lowering, node: Node) -> None:
    logits, attributes = at.view(node.inputs["logits"]), node.attributes
    slots = attributes["k"]
    chosen = at.new(node.outputs["chosen"], "i32", logits.rows, slots)
    gates = at.new(node.outputs["gates"], "f32", logits.rows, slots)
    block = next_power_of_2(logits.width)
    at.launch(
        "route.route",
        {
            "logits": at.pointer(logits),
            **at.given(node, "bias"),
            "chosen": at.pointer(chosen),
            "gates": at.pointer(gates),
        },
        {
            "E": logits.width,
            "SLOTS": slots,
            "STRIDE": logits.stride,
            "SIGMOID": bool(attributes["sigmoid"]),
            "NORMALISE": bool(attributes["normalise"]),
            "SCALE": float(attributes["scale"]),
            "GROUPS": attributes["groups"],
            "TOP_GROUPS": attributes["top_groups"],
            "BLOCK": block,
        },
        (Size(of=logits.rows),),
        warps=warps_for(block),
    )


def lower_expert_order(at: Lowering, node: Node) -> None:
    chosen = at.view(node.inputs["chosen"])
    order = at.new(node.outputs["order"], "i32", chosen.rows, chosen.width)
    experts = node.attributes["experts"]
    at.launch(
        "route.order",
        {
            "chosen": at.pointer(chosen),
            "order": at.pointer(order),
            "P": at.size(chosen.rows, chosen.width),
        },
        {"E": experts, "BLOCK": _pairs(at, chosen)},
        (Size(times=experts),),
    )


def _pairs(at: Lowering, chosen: View) -> int:
    """Return the number of (row, slot) pairs that a kernel reads at a time."""
    rows = 64 if at.regime.max_rows is None else at.regime.max_rows
    return min(1024, next_power_of_2(rows * chosen.width))


def _product(
    at: Lowering,
    node: Node,
    kernel: str,
    weights: tuple[str, ...],
    shape: tuple[int, ...],
    constants: dict[str, int],
    columns: int,
    trailing: tuple[str, ...] = (),
) -> None:
    """Launch a product by weights of `shape` [E, N, K], in steps of `columns` columns of a row.

    `trailing` are inputs that the kernel takes after all others.
    """
    x, chosen = at.view(node.inputs["x"]), at.view(node.inputs["chosen"])
    experts, outputs, width = shape
    y = at.new(node.outputs["y"], "f32", x.rows, chosen.width * outputs)
    rows = 64 if at.regime.many else 16
    block_n = 64 if at.regime.many else 32
    # On 4 warps, blocks of 128 columns take 255 registers and spill, and three stages take 80 KB.
    # On sm_75, blocks of 4 bits still spill 8 to 32 bytes, and those of 128 with a minimum 80.
    wide = columns >= 128
    warps: Warps = (8 if wide else 4) if at.regime.many else 2
    at.launch(
        f"experts.{kernel}",
        {
            "x": at.pointer(x),
            **at.given(node, "chosen", "order", *weights),
            "y": at.pointer(y),
            "P": at.size(chosen.rows, chosen.width),
            **at.given(node, *trailing),
        },
        {
            "N": outputs,
            "K": width,
            "SLOTS": chosen.width,
            "OWN": x.width != width,
            "PARTS": node.attributes["parts"],
            "X_STRIDE": x.stride,
            **constants,
            "PAIRS": _pairs(at, chosen),
            "BLOCK_M": rows,
            "BLOCK_N": block_n,
            "BLOCK_K": columns,
        },
        (Size(times=experts), Size(times=cdiv(outputs, block_n)), ONE),
        warps=warps,
        stages=2 if wide else 3,
    )


def lower_expert_linear(at: Lowering, node: Node) -> None:
    shape = at.constant(node.inputs["weight"]).shape
    _product(at, node, "floats", ("weight",), shape, {}, 32)


def lower_expert_linear_int8(at: Lowering, node: Node) -> None:
    shape = at.constant(node.inputs["weight"]).shape
    _product(at, node, "int8", ("weight", "weight_scale"), shape, {}, 64)


def lower_expert_linear_bits(at: Lowering, node: Node) -> None:
    bits, shared = node.attributes["bits"], node.attributes["block_size"]
    shape = (*at.constant(node.inputs["scales"]).shape[:2], node.attributes["K"])
    whole = int(node.op.startswith("ExpertLinearInt4"))
    constants = {"BITS": bits, "SHARED": shared, "WHOLE": whole}
    block = max(16 * 8 // bits, next_power_of_2(shared))
    trailing = ("minimums",) if "minimums" in node.inputs else ()
    _product(at, node, "bits", ("packed", "scales"), shape, constants, block, trailing)


lower_expert_linear_int4 = lower_expert_linear_bits
lower_expert_linear_bits_minimum = lower_expert_linear_int4_minimum = lower_expert_linear_bits


def lower_expert_sum(at: Lowering, node: Node) -> None:
    x, gates = at.view(node.inputs["x"]), at.view(node.inputs["gates"])
    y = at.new(node.outputs["y"], "f32", x.rows, x.width // gates.width)
    at.launch(
        "route.weigh",
        {"x": at.pointer(x), "gates": at.pointer(gates), "y": at.pointer(y)},
        {"N": y.width, "SLOTS": gates.width, "X_STRIDE": x.stride, "BLOCK": _BLOCK},
        (Size(of=x.rows), Size(times=cdiv(y.width, _BLOCK))),
    )
