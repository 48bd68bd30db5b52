"""Mamba-2's scans: which kernel runs them, and on how large a piece of the state.

A step reads and writes the state once, and hardly anything else: 80 heads of [64, 128] are 2.6 MB
in fp32. A program takes 4096 values of it, 16 a thread of 8 warps: a thread's 16 int8 values are
one load of 16 bytes, 16 fp32 values four of them. With as many threads (256) a row of B or C has
fewer values (128) than threads, and Triton lets each thread read those that it needs, also 16 bytes
at once, instead of passing them through shared memory behind a barrier for every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge.launch import DType, Size
from edge.plugins.lowering.context import (
    Arguments,
    Lower,
    Lowering,
    Node,
    View,
    Warps,
    cdiv,
    next_power_of_2,
)

_ELEMENTS = 4096  # of the state, for a program
_CHUNK, _CHUNK_P = 16, 64  # tokens and channels of a program of _by_chunks
_LARGEST = 3.4028234e38  # fp32; stands for an infinite dt_max
_STATES: Mapping[int, DType] = {32: "f32", 16: "f16", 8: "i8"}
_VALUES = ("x", "dt", "B", "C")
_WEIGHTS = ("A", "D", "dt_bias")


@dataclass(frozen=True)
class _Scan:
    """A node's inputs by the kernel's names; `state_type` is how the state is kept."""

    views: Mapping[str, View]
    weights: Mapping[str, str]
    scales: Mapping[str, str]
    state: str
    state_type: DType


def _floating(low: Lowering, node: Node) -> _Scan:
    views = {name: low.view(value) for name, value in zip(_VALUES, node.inputs[:4], strict=True)}
    weights = dict(zip(_WEIGHTS, node.inputs[4:7], strict=True))
    return _Scan(views, weights, {}, node.inputs[7], "f32")


def _int8(low: Lowering, node: Node) -> _Scan:
    names = (*_VALUES, *_WEIGHTS)
    given = dict(zip(names, node.inputs[0:14:2], strict=True))
    scales = {f"{n}_scale": s for n, s in zip(names, node.inputs[1:14:2], strict=True)}
    state_type = _STATES[node.attributes["state_bits"]]
    if state_type == "i8":
        scales["state_scale"] = node.inputs[15]
    return _Scan(
        {name: low.view(given[name]) for name in _VALUES},
        {name: given[name] for name in _WEIGHTS},
        scales,
        node.inputs[14],
        state_type,
    )


def _lower(low: Lowering, node: Node, scan: _Scan) -> None:
    """Rounded states are rounded after every token; an fp32 one need not wait for each."""
    attributes = node.attributes
    y = low.new(node.outputs[0], "f32", "TB", attributes["heads"] * attributes["head_dim"])
    arguments, constants = _arguments(low, scan, y), _constants(low, scan, attributes)
    if low.regime.many and scan.state_type == "f32":
        _by_chunks(low, arguments, constants)
    else:
        _by_tokens(low, arguments, constants)


def _by_tokens(low: Lowering, arguments: Arguments, constants: Mapping[str, int | float]) -> None:
    heads, p, n = (int(constants[name]) for name in ("HEADS", "P", "N"))
    block_n = next_power_of_2(n)
    block_p = min(next_power_of_2(p), max(1, _ELEMENTS // block_n))
    low.launch(
        "scan_heads.scan",
        arguments,
        {
            **constants,
            "BLOCK_P": block_p,
            "BLOCK_N": block_n,
            "TREE": low.regime.kind == "tree",
        },
        (Size(times=heads), Size(times=cdiv(p, block_p)), Size(of="B")),
        warps=_warps(block_p * block_n),
        stages=1,
        settles=True,
    )


def _by_chunks(low: Lowering, arguments: Arguments, constants: Mapping[str, int | float]) -> None:
    """16 tokens at a time, all 64 channels of a head in one program of 8 warps.

    With fp32 and 32 tokens, or 4 warps, Triton 3.9 runs out of registers. Per token and head it is
    about 70 instructions a warp of int8 values and 165 of fp32 ones, against 600 and 540 token by
    token (sm_87, counted in the loops' machine code, not timed).
    """
    heads, p, n = (int(constants[name]) for name in ("HEADS", "P", "N"))
    block_p = max(16, min(next_power_of_2(p), _CHUNK_P))
    block_n = max(32, next_power_of_2(n))  # products of int8 take 32
    left_out = ("state_scale", "ancestors")
    low.launch(
        "scan_chunked.scan",
        {name: value for name, value in arguments.items() if name not in left_out},
        {
            **{name: value for name, value in constants.items() if name != "STATE_SCALES"},
            "BLOCK_P": block_p,
            "BLOCK_N": block_n,
            "CHUNK": _CHUNK,
        },
        (Size(times=heads), Size(times=cdiv(p, block_p)), Size(of="B")),
        warps=8,
        stages=1,
        settles=True,
    )


def _warps(values: int) -> Warps:
    """16 values a thread."""
    if values >= 4096:
        return 8
    if values >= 2048:
        return 4
    return 2 if values >= 1024 else 1


def _arguments(low: Lowering, scan: _Scan, y: View) -> Arguments:
    """In the kernel's order; None is not there."""
    x, b = scan.views["x"], scan.views["B"]
    prefix = scan.state.removesuffix("ssm_state")
    widths = {"x": x.width, "dt": scan.views["dt"].width, "B": b.width}
    return {
        **{name: low.pointer(view) for name, view in scan.views.items()},
        **{name: low.pointer(low.constant(value)) for name, value in scan.weights.items()},
        **dict.fromkeys(f"{name}_scale" for name in (*_VALUES, *_WEIGHTS)),
        "state_scale": None,
        **{name: low.pointer(low.constant(value)) for name, value in scan.scales.items()},
        "state": low.state(scan.state, scan.state_type),
        **{
            f"log_{name}": low.log(f"{prefix}scan_{name}", scan.views[name].dtype, width)
            for name, width in widths.items()
        },
        "y": low.pointer(y),
        "run": low.run(),
        "replay": low.replay(),
        "slots": low.slots(),
        "ancestors": low.ancestors() if low.regime.kind == "tree" else None,
        "tokens": low.size("T"),
        "batch": low.size("B"),
    }


def _constants(low: Lowering, scan: _Scan, attributes: Mapping[str, Any]) -> dict[str, int | float]:
    def count(name: str) -> int:
        return low.constant(scan.scales[name]).size if name in scan.scales else 0

    return {
        "HEADS": attributes["heads"],
        "P": attributes["head_dim"],
        "N": attributes["d_state"],
        "GROUPS": attributes["groups"],
        "DT_MIN": float(attributes["dt_min"]),
        "DT_MAX": min(float(attributes["dt_max"]), _LARGEST),
        **{f"{name.upper()}_STRIDE": scan.views[name].stride for name in _VALUES},
        **{f"{name.upper()}_SCALES": count(f"{name}_scale") for name in _VALUES},
        "STATE_SCALES": count("state_scale"),
    }


def scan_heads(low: Lowering, node: Node) -> None:
    """`SelectiveScanHeads`: fp32."""
    _lower(low, node, _floating(low, node))


def scan_heads_int8(low: Lowering, node: Node) -> None:
    """`SelectiveScanHeadsInt8`: int8 values, a state of 32, 16 or 8 bits."""
    _lower(low, node, _int8(low, node))


LOWER: dict[str, Lower] = {
    "SelectiveScanHeads": scan_heads,
    "SelectiveScanHeadsInt8": scan_heads_int8,
}
