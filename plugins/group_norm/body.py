"""The ONNX function bodies of the norms in groups and in parts."""

from __future__ import annotations

import re

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


def _part(name: str) -> str:
    body = RMS % {"x": name}
    for word in ("two", "square", "mean", "small", "shifted", "root", "unit"):
        body = re.sub(rf"\b{word}\b", f"{word}_{name}", body)
    return body


PARTS_RMS_NORM = (
    """
    axes = Constant<value = int64[1] {-1}>()
    first_0 = Constant<value_int: int = @first>()
    first_1 = Reshape(first_0, axes)
    width = Shape<start=-1>(x)
    others = Sub(width, first_1)
    halves = Constant<value = int64[1] {2}>()
    half = Div(others, halves)
    sizes = Concat<axis=0>(first_1, half, half)
    a, b, c = Split<axis=-1>(x, sizes)
"""
    + _part("a")
    + _part("b")
    + _part("c")
    + """
    joined = Concat<axis=-1>(unit_a, unit_b, unit_c)
    y = Mul(joined, weight)
"""
)
