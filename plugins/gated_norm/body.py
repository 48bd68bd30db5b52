"""ONNX function bodies of the gated norm, and of gates without a norm."""

from __future__ import annotations

from edge.plugins.norm.body import LAST, RMS, norm_of_groups

_GATED = """
    open = Sigmoid(%(z)s)
    gate = Mul(%(z)s, open)
    gated = Mul(x, gate)
"""
_WIDE_GATE = "    gate_in = DequantizeLinear<axis=-1>(z, z_scale)\n"
_ORT_WIDE_GATE = """
    quants = Cast<to=1>(z)
    gate_in = Mul(quants, z_scale)
"""
# One group needs no reshape, so ONNX Runtime fuses the norm.
_NORM_OF_ONE_GROUP = LAST + RMS % {"x": "gated"} + "    y = Mul(unit, weight)\n"

SILU_GATE = """
    open = Sigmoid(z)
    gate = Mul(z, open)
    y = Mul(x, gate)
"""


SIGMOID_GATE = """
    open = Sigmoid(z)
    y = Mul(x, open)
"""

HEAD_GATE = """
    one_count = Constant<value_int: int = @heads>()
    last = Constant<value = int64[1] {-1}>()
    count = Reshape(one_count, last)
    stay = Constant<value = int64[2] {0, 0}>()
    split_shape = Concat<axis=0>(stay, count, last)
    split = Reshape(x, split_shape)
    open = Sigmoid(z)
    column = Unsqueeze(open, last)
    gated = Mul(split, column)
    joined_shape = Constant<value = int64[3] {0, 0, -1}>()
    y = Reshape(gated, joined_shape)
"""


def gated_rms_norm(groups: int | None, gate: str = "z") -> str:
    return _GATED % {"z": gate} + (_NORM_OF_ONE_GROUP if groups == 1 else norm_of_groups("gated"))


def gated_rms_norm_int8(groups: int | None, ort: bool) -> str:
    return (_ORT_WIDE_GATE if ort else _WIDE_GATE) + gated_rms_norm(groups, "gate_in")
