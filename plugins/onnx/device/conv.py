"""Bodies of the convolutions whose state stays where it is.

The functional op does the work: what a token reads lies in [state slot | log | new tokens], which
is its state and its x.
"""

from __future__ import annotations

from edge.ops import OPS
from edge.plugins.onnx.device.text import call, fields, logs, stored


def conv(function: str, x: str, prefix: str = "") -> str:
    """`{prefix}y` and the states after it; constants have the prefix too."""
    op = OPS[function]
    names = {v.name: f"{prefix}{v.name}" for v in op.inputs if v.role == "weight"}
    names |= {"x": x, "conv_state": "conv_before", "kept_taps": "kept_taps"}
    return (
        fields("source", "target", "store")
        + """
    conv_slot = Gather<axis=0>(conv_state, source)
    conv_before = Concat<axis=0>(conv_slot, conv_in)
    any_row = Constant<value = int32 {0}>()
    keeps = Greater(store, from_0)
    safe_taps = Where(keeps, state_taps, any_row)
    kept_taps = Unsqueeze(safe_taps, axis_0)
"""
        + call(function, op, names, {"y": f"{prefix}y"})
        + stored("conv_state", "conv_states")
        + logs({"conv_in": x})
    )
