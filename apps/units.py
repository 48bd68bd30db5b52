"""Sizes for people."""

from __future__ import annotations


def megabytes(size: int) -> str:
    """Bytes as kB, MB or GB with three significant digits (powers of 1000)."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
