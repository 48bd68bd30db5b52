"""Lowering of Mamba-2's scan: which kernel runs it, and the size of its blocks.

A step reads and writes the state once, and little else: 80 heads of [64, 128] are 2.6 MB in fp32. A
program takes 4096 values of the state, 16 per thread of 8 warps: 16 int8 values are one load of 16
bytes, 16 fp32 values are four. With 256 threads, a row of B or C has fewer values (128) than
threads. Triton then lets each thread read the values it needs, also 16 bytes at once, instead of
passing them through shared memory with a barrier for every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from edge.launch import Size
from edge.plugins.lowering.context import (
    Arguments,
    Lowering,
    Node,
    Warps,
    cdiv,
    next_power_of_2,
)
from edge.plugins.selective_scan.lowering import STATES, kernel_names, logs, steering

_ELEMENTS = 4096  # elements of the state per program
# of by_chunks
CHUNK = 64  # tokens of a chunk
_CHANNELS = 64  # of a program
_COLUMNS = 32  # columns of N of a program
_STEP = 32  # tokens of a step of `states`
_ROWS = 32  # tokens of a program of `outputs`
_HEADS = 16  # heads of a program of `prepare`
_LEFT_OUT = ("state_scale", "ancestors")
_UNREAD = (*_LEFT_OUT, "dt", "B", "slots", "DT_STRIDE", "B_STRIDE", "STATE_SCALES")
_LARGEST = 3.4028234e38  # largest fp32, in place of an infinite dt_max
_VALUES = ("x", "dt", "B", "C")
_WEIGHTS = ("A", "D", "dt_bias")
Value = TypeVar("Value")


def lower(at: Lowering, node: Node) -> None:
    """Launch the scan, by chunks for prefill with an fp32 state, else token by token.

    States in fewer bits must be rounded after every token.
    """
    state_type = STATES[node.attributes["state_bits"]] if node.int8 else "f32"
    node = kernel_names(node, state_type)
    y = at.new(
        node.outputs["y"], "f32", "TB", node.attributes["heads"] * node.attributes["head_dim"]
    )
    scales = tuple(f"{name}_scale" for name in (*_VALUES, *_WEIGHTS, "state"))
    arguments = {
        **at.given(node, *_VALUES, *_WEIGHTS, *scales),
        "state": at.state(node.inputs["ssm_state"], state_type),
        **logs(at, node, {name: at.view(node.inputs[name]) for name in ("x", "dt", "B")}),
        "y": at.pointer(y),
        **steering(at),
    }
    if at.regime.many and state_type == "f32":
        by_chunks(at, node, arguments, _constants(at, node))
    else:
        _by_tokens(at, arguments, _constants(at, node))


def _by_tokens(at: Lowering, arguments: Arguments, constants: Mapping[str, int | float]) -> None:
    heads, p, n = (int(constants[name]) for name in ("HEADS", "P", "N"))
    block_n = next_power_of_2(n)
    block_p = min(next_power_of_2(p), max(1, _ELEMENTS // block_n))
    at.launch(
        "scan_heads.scan",
        arguments,
        {
            **constants,
            "BLOCK_P": block_p,
            "BLOCK_N": block_n,
            "TREE": at.regime.kind == "tree",
        },
        (Size(times=heads), Size(times=cdiv(p, block_p)), Size(of="B")),
        warps=warps_for_states(block_p * block_n),
        stages=1,
        settles=True,
    )


def by_chunks(
    at: Lowering, node: Node, arguments: Arguments, constants: Mapping[str, int | float]
) -> None:
    """Launch `scan_terms` and the two kernels of `scan_chunks`.

    A program of the serial one runs 64 channels and 32 columns of a head's state through all
    chunks. One of `outputs` computes 64 channels of 32 tokens.
    """
    heads, p, n = (int(constants[name]) for name in ("HEADS", "P", "N"))
    block_p = max(16, min(next_power_of_2(p), _CHANNELS))
    parts, pieces = cdiv(p, block_p), cdiv(n, _COLUMNS)
    between = _between(at, node, heads, p * n)
    tiles = {"BLOCK_P": block_p, "BLOCK_N": _COLUMNS, "CHUNK": CHUNK}
    groups = int(constants["GROUPS"])
    at.launch(
        "scan_terms.prepare",
        {
            **_of(arguments, "dt", "B", "C", "A", "dt_bias"),
            **_only(between, "delta", "sums", "alike"),
        },
        {
            **_only(constants, "HEADS", "N", "GROUPS", "DT_MIN", "DT_MAX", *_forms("dt", "B", "C")),
            "BLOCK_H": _HEADS,
            "BLOCK_N": _COLUMNS,
            "CHUNK": CHUNK,
        },
        (Size(of="T", per=CHUNK), Size(of="B"), Size(times=groups + cdiv(heads, _HEADS))),
    )
    at.launch(
        "scan_chunks.states",
        {
            **{name: value for name, value in arguments.items() if name not in _LEFT_OUT},
            **_only(between, "delta", "sums", "later"),
        },
        {
            **{name: value for name, value in constants.items() if name != "STATE_SCALES"},
            **tiles,
            "PIECES": pieces,
            "STEP": _STEP,
        },
        (Size(times=heads), Size(times=parts * pieces), Size(of="B")),
        settles=True,
    )
    at.launch(
        "scan_chunks.outputs",
        {**{n: v for n, v in arguments.items() if n not in _UNREAD}, **between},
        {
            **{name: value for name, value in constants.items() if name not in _UNREAD},
            **tiles,
            "PARTS": parts,
            "ROWS": _ROWS,
        },
        (Size(times=heads * parts), Size(of="T", per=_ROWS), Size(of="B")),
    )


def _of(arguments: Arguments, *names: str) -> Arguments:
    """Return these arguments with their scales, `tokens` and `batch`."""
    return _only(arguments, *names, *(f"{name}_scale" for name in names), "tokens", "batch")


def _only(given: Mapping[str, Value], *names: str) -> dict[str, Value]:
    return {name: value for name, value in given.items() if name in names}


def _forms(*names: str) -> tuple[str, ...]:
    return tuple(f"{name.upper()}_{form}" for name in names for form in ("STRIDE", "SCALES"))


def _between(at: Lowering, node: Node, heads: int, size: int) -> Arguments:
    """Return buffers for what `prepare` computes, and for the first states of all chunks but the
    first. These are allocated as rows, because CHUNK tokens precede each.
    """
    widths = {
        "delta": heads,
        "sums": 2 * heads,
        "alike": node.attributes["groups"] * CHUNK,
        "later": cdiv(heads * size, CHUNK),
    }
    return {
        name: at.pointer(at.new(f"{node.outputs['y']}.{name}", "f32", "TB", width))
        for name, width in widths.items()
    }


def warps_for_states(values: int) -> Warps:
    """Return the warps for 16 values per thread."""
    if values >= 4096:
        return 8
    if values >= 2048:
        return 4
    return 2 if values >= 1024 else 1


def _constants(at: Lowering, node: Node) -> dict[str, int | float]:
    strides = {f"{name.upper()}_STRIDE": at.view(node.inputs[name]).stride for name in _VALUES}
    scaled = (*_VALUES, "state")
    return {
        "HEADS": node.attributes["heads"],
        "P": node.attributes["head_dim"],
        "N": node.attributes["d_state"],
        "GROUPS": node.attributes["groups"],
        "DT_MIN": float(node.attributes["dt_min"]),
        "DT_MAX": min(float(node.attributes["dt_max"]), _LARGEST),
        **strides,
        **{f"{name.upper()}_SCALES": at.count(node, f"{name}_scale") for name in scaled},
    }
