"""Products with experts in 8 or 4 bits as TensorRT has them, where packed bytes are i8."""

from __future__ import annotations

import re

from edge.plugins.device.text import CONSTANTS, views
from edge.plugins.experts.body import PACKED, ROUNDED, plain
from edge.plugins.linear.device import QUANTS, SIGNED

# names that the plain bodies have too
_TAKEN = re.compile(r"\b(pairs|lead|block|nothing)\b")


def _product(bits: int, rounds: str) -> str:
    unpacked = _TAKEN.sub(r"byte_\1", SIGNED + QUANTS[bits] % {"bytes": "signed"})
    wide = """
    block_scale = Unsqueeze(scales, end)
    blocks = Mul(centred, block_scale)
    keep = Constant<value = int64[3] {0, 0, -1}>()
    stacked = Reshape(blocks, keep)
    wide = Gather(stacked, pairs)
"""
    body = plain(PACKED, rounds, unpacked + wide).replace("Reshape(x,", "Reshape(x_own,")
    return CONSTANTS + views(["x"]) + body


def expert_linear_bits(bits: int) -> str:
    return _product(bits, "")


EXPERT_LINEAR_INT4 = _product(4, ROUNDED)
