"""Sizes, kernels and graphs as text, for several programs."""

from __future__ import annotations

from collections.abc import Mapping


def megabytes(size: int) -> str:
    """Format bytes as kB, MB or GB with three significant digits (powers of 1000)."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def kernel_line(sizes: Mapping[str, tuple[int, int]], unplanned: str | None) -> str:
    """Describe the kernels of a bundle; `unplanned` says why there is no launch plan."""
    if unplanned is not None:
        return f"none, and no launch plan to compile them from: {unplanned}"
    if not sizes:
        return "none; edge export --target compiles them from the launch plan"
    return ", ".join(f"{sm}: {n} in {megabytes(size)}" for sm, (n, size) in sizes.items())


def tensorrt_line(size: int | None, why: str | None) -> str:
    """Describe the TensorRT graph of `size` bytes, or say `why` there is none."""
    if size is not None:
        return f"a graph of {megabytes(size)} to build an engine from"
    return f"no graph: {why or 'the kernels it would run are missing'}"
