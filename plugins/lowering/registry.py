"""Every op that has a kernel, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping

from edge.plugins.lowering import (
    attention,
    conv,
    embed,
    gated_norm,
    gelu,
    hadamard,
    linear,
    linear_bits,
    linear_conv,
    linear_int4,
    linear_int8,
    norm,
    rope,
    rounding,
    rows,
    scan,
    scan_heads,
    views,
)
from edge.plugins.lowering.context import Lower

_MODULES = (
    attention, conv, embed, gated_norm, gelu, hadamard, linear, linear_bits, linear_conv,
    linear_int4, linear_int8, norm, rope, rounding, rows, scan, scan_heads, views,
)  # fmt: skip
LOWER: Mapping[str, Lower] = {op: lower for each in _MODULES for op, lower in each.LOWER.items()}
