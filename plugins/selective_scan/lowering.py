"""Lowering to the kernels of `scan`.

Channels are the last axis of the state [B, N, E]. A warp takes 32 channels, and a thread all N
states of one, so the sum over N and everything per channel needs no other thread. A program is two
warps: Mamba 2.8B, E 5120, has 80 programs, 10 for each of an Orin Nano's 8 SMs, and 5 warps for
each of its schedulers. Registers (126 to 168 a thread) let 6 to 8 of the 10 run at once.

Tokens are processed one after the other, as a state that is rounded after every token requires.
With an fp32 state, a prompt may be cut into parts that run in parallel. That is half as much work
again, and pays off where latency per token dominates (an H100: 80 programs on 132 SMs), but not
where the SMs are full (an Orin Nano: 80 on 8). The plan is the same for both; the run says how many
programs the device has room for.

Counted in the SASS for sm_87, a token of prefill takes 295 instructions per warp with an int8 state
and 231 with an fp32 one: 16 states at 6 each, one of them an exp2 (int8 rounding adds 4), and some
135 for softplus, gate and addresses. At one instruction per clock, a token of a layer of Mamba 2.8B
(160 warps) takes 1500 clocks of an Orin Nano, 1.5 µs at 1 GHz: 100 ms for 1024 tokens of 64 layers,
not measured. An H100 has three times as many schedulers as there are warps. Measured there, the
scans of such a prompt take 38 ms in one part and 9 ms in 13 parts.

`SelectiveScanInt8Dt` and `SelectiveScanDt` also compute dt, for at most 16 rows: each program
computes the columns of its channels, as `linear_int8` and `linear` do for few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edge.launch import DType, Size
from edge.plugins.lowering.context import (
    ONE,
    Arguments,
    Lowering,
    Node,
    View,
    cdiv,
    next_power_of_2,
)
from edge.plugins.lowering.fuse import Pair
from edge.plugins.selective_scan.device import DT_NAMES

PAIRS = tuple(
    Pair(f"{second}Dt", first, second, through=("dt",), first_names=DT_NAMES, few=True)
    for first, second in (
        ("Linear", "SelectiveScan"),
        ("Linear", "SelectiveScanGroups"),
        ("LinearInt8Quantize", "SelectiveScanInt8"),
        ("LinearInt8Quantize", "SelectiveScanGroupsInt8"),
    )
)
_VALUES = ("x", "dt", "B", "C", "z")
_WEIGHTS = ("A", "D", "dt_bias")
_PRODUCT = ("low_dt", "low_dt_scale", "dt_weight", "dt_weight_scale")
STATES: Mapping[int, DType] = {32: "f32", 16: "f16", 8: "i8"}
_WIDENED_ROWS = 64
# minimum tokens of a part of a prompt, and maximum number of parts
_PART, _PARTS = 32, 16
_NO_PRODUCT = {"LOW_STRIDE": 0, "RANK": 0, "BLOCK_K": 0, "ROWS": 0}


def kernel_names(node: Node, state_type: DType) -> Node:
    """Return `node` with its inputs named as in the kernels.

    A_log takes the place of A. The scale of a state that is not int8 is dropped.
    """
    names = {"A_log": "A", "A_log_scale": "A_scale"}
    inputs = {names.get(name, name): value for name, value in node.inputs.items()}
    if state_type != "i8":
        inputs.pop("state_scale", None)
    return replace(node, inputs=inputs)


def lower(at: Lowering, node: Node) -> None:
    """Launch one program for BLOCK_E channels of a sequence, all of one group.

    The grid does not depend on T. A thread has 16 states: 32, with their rates, prefetched inputs
    and the sums of dt, need more than 255 registers. A product on tensor cores takes at least 16
    channels.
    """
    state_type = STATES[node.attributes["state_bits"]] if node.int8 else "f32"
    node = kernel_names(node, state_type)
    state, output = node.inputs["ssm_state"], node.outputs["y"]
    x, (n, _) = at.view(node.inputs["x"]), at.constant(node.inputs["A"]).shape
    groups = [at.view(node.inputs[name]).width // n for name in ("B", "C")]
    logs = _logs(at, node)
    if node.int8 and at.regime.many and max(groups) == 1:
        node = _widened(at, node)
    y = at.new(output, "f32", "TB", x.width)
    block_n, group_width = next_power_of_2(n), x.width // groups[1]
    block_e = max(16, min(1024 // max(16, block_n), next_power_of_2(group_width)))
    scales = tuple(f"{name}_scale" for name in (*_VALUES, *_WEIGHTS, "state"))
    # The first of two launches computes the end of each part of a prompt from a zero state, the
    # second runs the parts from their true first states.
    split = at.regime.many and state_type == "f32"
    for ends in (True, False) if split else (False,):
        at.launch(
            "scan.scan",
            {
                **at.given(node, *_VALUES, *_PRODUCT, *_WEIGHTS, *scales),
                "state": at.state(state, state_type),
                **logs,
                "y": None if ends else at.pointer(y),
                **steering(at),
                **(_parts(at, output, n, x.width) if split else {}),
            },
            {
                "E": x.width,
                "N": n,
                "BLOCK_E": block_e,
                "BLOCK_N": block_n,
                **_forms(at, node),
                **({"PART": _PART, "PARTS": _PARTS, "ENDS": ends} if split else {}),
                **({"B_GROUPS": groups[0], "C_GROUPS": groups[1]} if groups[1] > 1 else {}),
            },
            (
                Size(times=groups[1] * cdiv(group_width, block_e)),
                Size(of="B"),
                Size(times=_PARTS) if split else ONE,
            ),
            warps=4 if block_n > 64 else 2,
            stages=2,
            settles=not ends,
        )


def steering(at: Lowering) -> Arguments:
    """Return the index inputs and sizes that determine which tokens a scan runs."""
    return {
        "run": at.run(),
        "replay": at.replay(),
        "slots": at.slots(),
        "ancestors": at.ancestors() if at.regime.kind == "tree" else None,
        "tokens": at.size("T"),
        "batch": at.size("B"),
    }


def _parts(at: Lowering, output: str, n: int, channels: int) -> Arguments:
    """Return buffers for the end states of a prompt's parts.

    They are allocated as rows, because a part has at least _PART tokens.
    """
    widths = {"part_state": n * channels, "part_dt": channels}
    return {
        name: at.pointer(at.new(f"{output}.{name}", "f32", "TB", cdiv(width, _PART)))
        for name, width in widths.items()
    }


def _widened(at: Lowering, node: Node) -> Node:
    """Convert B and C to fp32 in a separate launch, without scaling.

    Every channel reads them: a thread would convert 32 of them per token, in a unit that does 4 a
    clock (16 per SM). This saves 62 of 370 instructions on sm_87.
    """
    b, c = at.view(node.inputs["B"]), at.view(node.inputs["C"])
    joined = f"{node.outputs['y']}.BC"
    wide = at.new(joined, "f32", "TB", 2 * b.width)
    at.launch(
        "scan.widen",
        {**at.given(node, "B", "C"), "wide": at.pointer(wide), "rows": at.size("TB")},
        {
            "N": b.width,
            "B_STRIDE": b.stride,
            "C_STRIDE": c.stride,
            "BLOCK_M": _WIDENED_ROWS,
            "BLOCK_N": next_power_of_2(b.width),
        },
        (Size(of="TB", per=_WIDENED_ROWS),),
    )
    columns = {"B": wide.columns(0, b.width), "C": wide.columns(b.width, b.width)}
    at.views |= {f"{joined}.{name}": view for name, view in columns.items()}
    return replace(node, inputs={**node.inputs, **{name: f"{joined}.{name}" for name in columns}})


def _logs(at: Lowering, node: Node) -> Arguments:
    """Return the logs that a replay reads. A dt computed in the kernel is logged like an input."""
    views = {name: at.view(node.inputs[name if name in node.inputs else "x"])
             for name in ("x", "dt", "B")}  # fmt: skip
    return logs(at, node, views)


def logs(at: Lowering, node: Node, views: Mapping[str, View]) -> Arguments:
    """Return the log of each of `views` as an argument."""
    state = node.inputs["ssm_state"]
    return {
        f"log_{name}": at.log(state, f"scan_{name}", view.dtype, view.width)
        for name, view in views.items()
    }


def _forms(at: Lowering, node: Node) -> dict[str, Any]:
    """Return strides, numbers of scales, and the constants of the product that makes dt."""
    strides = {
        f"{name.upper()}_STRIDE": at.view(node.inputs[name]).stride if name in node.inputs else 0
        for name in _VALUES
    }
    scaled = (*_VALUES, "state", "dt_weight")
    return {
        **strides,
        **{f"{name.upper()}_SCALES": at.count(node, f"{name}_scale") for name in scaled},
        **(_product(at, node) if "low_dt" in node.inputs else _NO_PRODUCT),
    }


def _product(at: Lowering, node: Node) -> dict[str, int]:
    """Return the tiling of low_dt · dt_weightᵀ: int8 in one step, fp32 without register spills."""
    low = at.view(node.inputs["low_dt"])
    few = at.regime.max_rows is not None and at.regime.max_rows <= 8
    columns = {"i8": 256, "f16": 64, "f32": 32}[at.constant(node.inputs["dt_weight"]).dtype]
    block_k = min(columns, max(64, next_power_of_2(low.width)))
    return {
        "LOW_STRIDE": low.stride,
        "RANK": low.width,
        "BLOCK_K": block_k,
        "ROWS": 8 if few else 16,
    }
