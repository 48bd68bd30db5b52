"""The ONNX function body of the norm in groups."""

from __future__ import annotations

from edge.plugins.norm.body import RMS

GROUP_RMS_NORM = (
    """
    groups_0 = Constant<value_int: int = @groups>()
    axes = Constant<value = int64[1] {-1}>()
    groups_1 = Reshape(groups_0, axes)
    stay = Constant<value = int64[2] {0, 0}>()
    split_shape = Concat<axis=0>(stay, groups_1, axes)
    grouped = Reshape(x, split_shape)
"""
    + RMS % {"x": "grouped"}
    + """
    joined_shape = Constant<value = int64[3] {0, 0, -1}>()
    joined = Reshape(unit, joined_shape)
    y = Mul(joined, weight)
"""
)
