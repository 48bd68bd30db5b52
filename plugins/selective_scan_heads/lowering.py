"""Lowering of Mamba-2's scan: which kernel runs it, and the size of its blocks.

A step reads and writes the state once, and little else: 80 heads of [64, 128] are 2.6 MB in fp32. A
program takes 4096 values of the state, 16 per thread of 8 warps: 16 int8 values are one load of 16
bytes, 16 fp32 values are four. With 256 threads, a row of B or C has fewer values (128) than
threads. Triton then lets each thread read the values it needs, also 16 bytes at once, instead of
passing them through shared memory with a barrier for every token.
"""

from __future__ import annotations

from collections.abc import Mapping

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
_CHUNK, _CHUNK_P = 16, 64  # tokens per chunk and channels per program in _by_chunks
_LARGEST = 3.4028234e38  # largest fp32, in place of an infinite dt_max
_VALUES = ("x", "dt", "B", "C")
_WEIGHTS = ("A", "D", "dt_bias")


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
        _by_chunks(at, arguments, _constants(at, node))
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


def _by_chunks(at: Lowering, arguments: Arguments, constants: Mapping[str, int | float]) -> None:
    """Launch one program of 8 warps for all 64 channels of a head, 16 tokens at a time.

    With fp32 and 32 tokens, or 4 warps, Triton 3.9 runs out of registers. One token of one head
    takes about 70 instructions per warp for int8 values and 165 for fp32, against 600 and 540 token
    by token (sm_87, counted in the loops' machine code, not timed).
    """
    heads, p, n = (int(constants[name]) for name in ("HEADS", "P", "N"))
    block_p = max(16, min(next_power_of_2(p), _CHUNK_P))
    block_n = max(32, next_power_of_2(n))  # int8 products need at least 32
    left_out = ("state_scale", "ancestors")
    at.launch(
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
