"""Device ops of products with experts in 8 or 4 bits, where packed bytes are i8."""

from __future__ import annotations

import re

from edge.plugins.device.text import CONSTANTS, views
from edge.plugins.experts.body import PACKED, ROUNDED, plain
from edge.plugins.linear.device import QUANTS, SIGNED

# names that the plain bodies also use
_TAKEN = re.compile(r"\b(pairs|lead|block|nothing)\b")


_SCALED = """
    block_scale = Unsqueeze(scales, end)
    blocks = Mul(centred, block_scale)
"""
_FROM_MINIMUM = """
    wide_scales = Cast<to=1>(scales)
    block_scale = Unsqueeze(wide_scales, end)
    wide_minimums = Cast<to=1>(minimums)
    block_minimum = Unsqueeze(wide_minimums, end)
    by_scale = Mul(unpacked, block_scale)
    blocks = Add(by_scale, block_minimum)
"""


def _product(bits: int, rounds: str, scaled: str = _SCALED) -> str:
    unpacked = _TAKEN.sub(r"byte_\1", SIGNED + QUANTS[bits] % {"bytes": "signed"})
    wide = """
    keep = Constant<value = int64[3] {0, 0, -1}>()
    stacked = Reshape(blocks, keep)
    wide = Gather(stacked, pairs)
"""
    body = plain(PACKED, rounds, unpacked + scaled + wide).replace("Reshape(x,", "Reshape(x_own,")
    return CONSTANTS + views(["x"]) + body


def expert_linear_bits(bits: int) -> str:
    return _product(bits, "")


EXPERT_LINEAR_INT4 = _product(4, ROUNDED)
EXPERT_LINEAR_BITS_MINIMUM = _product(4, "", _FROM_MINIMUM)
EXPERT_LINEAR_INT4_MINIMUM = _product(4, ROUNDED, _FROM_MINIMUM)
