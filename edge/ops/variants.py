"""What a function of an op is called: `Linear`, or by its attributes `EmbedBits_4`.

A function is an op, or an op's variant for some attribute values, whose body is another.
"""

from __future__ import annotations

from collections.abc import Mapping

_GROUPED = ("GatedRMSNorm", "GatedRMSNormInt8", "SelectiveScanHeads", "SelectiveScanHeadsInt8")
_KEPT_IN_BITS = ("SelectiveScanInt8", "SelectiveScanHeadsInt8")
_PACKED = ("EmbedBits", "LinearBits")


def variants(op: str, attributes: Mapping[str, float]) -> str:
    """The function that implements `op` for these attribute values."""
    if op in _PACKED:
        return f"{op}_{attributes['bits']}"
    name = f"{op}_{attributes['state_bits']}" if op in _KEPT_IN_BITS else op
    return f"{name}_1" if op in _GROUPED and attributes["groups"] == 1 else name


def every_variant(op: str) -> tuple[str, ...]:
    """Every function of `op`."""
    choices = [
        {"bits": bits, "state_bits": state_bits, "groups": groups}
        for bits in (8, 4)
        for state_bits in (32, 16, 8)
        for groups in (2, 1)
    ]
    return tuple(dict.fromkeys(variants(op, attributes) for attributes in choices))
