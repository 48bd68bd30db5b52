"""ONNX function bodies of the norms of groups and of parts."""

from __future__ import annotations

import re

from edge.plugins.norm.body import RMS, norm_of_groups

GROUP_RMS_NORM = norm_of_groups("x")


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
