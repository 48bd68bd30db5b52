"""Lowering to the kernel of `delta_rule`, token by token for chains, trees and prefill alike."""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import Lowering, Node, cdiv, next_power_of_2
from edge.plugins.selective_scan.lowering import logs, steering
from edge.plugins.selective_scan_heads.lowering import warps_for_states

_ELEMENTS = 4096  # elements of the state per program
_VALUES = ("x", "dt", "B", "C")


def lower(at: Lowering, node: Node) -> None:
    """Launch one program for some channels of a head; rows of the state are independent."""
    heads, p, n = (int(node.attributes[name]) for name in ("heads", "head_dim", "d_state"))
    views = {name: at.view(node.inputs[name]) for name in _VALUES}
    y = at.new(node.outputs["y"], "f32", "TB", heads * p)
    block_n = next_power_of_2(n)
    block_p = min(next_power_of_2(p), max(1, _ELEMENTS // block_n))
    at.launch(
        "delta_rule.scan",
        {
            **at.given(node, *_VALUES, "A", "dt_bias"),
            "state": at.state(node.inputs["ssm_state"], "f32"),
            **logs(at, node, {name: views[name] for name in ("x", "dt", "B")}),
            "y": at.pointer(y),
            **steering(at),
        },
        {
            "HEADS": heads,
            "P": p,
            "N": n,
            "GROUPS": int(node.attributes["groups"]),
            "BETA_MAX": float(node.attributes["beta_max"]),
            **{f"{name.upper()}_STRIDE": view.stride for name, view in views.items()},
            "BLOCK_P": block_p,
            "BLOCK_N": block_n,
            "TREE": at.regime.kind == "tree",
        },
        (Size(times=heads), Size(times=cdiv(p, block_p)), Size(of="B")),
        warps=warps_for_states(block_p * block_n),
        stages=1,
        settles=True,
    )
