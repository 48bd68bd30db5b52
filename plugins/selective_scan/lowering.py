"""How `scan` is called.

The state [B, N, E] lies along the channels, so a warp takes 32 of them and a thread all N states of
one: the sum over N, and everything that is one a channel, needs no other thread. Two warps a
program: Mamba 2.8B, E 5120, has 80 programs, 10 for each of an Orin Nano's 8 multiprocessors, and 5
warps for each of its schedulers. Registers (126 to 168 a thread) let 6 to 8 of the 10 run at once.

Tokens are taken one after the other. A state that is rounded after every token allows nothing else.
For an fp32 state a prompt may be cut into parts that run side by side. That is half as much work
again, and worth it where a token's latency is what there is to wait for (an H100: 80 programs on
132 multiprocessors), not where the multiprocessors are full (an Orin Nano: 80 on 8). The plan is
the same for both; the run says how many programs the device has room for.

Counted in the SASS for sm_87, a token of prefill takes a warp 295 instructions with an int8 state
and 231 with an fp32 one: 16 states of 6 (4 more to round to int8), one of them an exp2, and some
135 for softplus, gate and addresses. So at one instruction a clock, a token of a layer of
Mamba 2.8B (160 warps) is 1500 clocks of an Orin Nano, 1.5 µs at 1 GHz: 100 ms for 1024 tokens of 64
layers, not measured. An H100 has three times as many schedulers as there are warps. Measured there,
such a prompt's scans take 38 ms from the first token to the last, and 9 ms in 13 parts.

`SelectiveScanInt8Dt` and `SelectiveScanDt` also make dt, of at most 16 rows: each program the
columns of its channels, by what `linear_int8` and `linear` do for few rows.
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
# tokens that make a part of a prompt worth its own program, and the most parts
_PART, _PARTS = 32, 16
_NO_PRODUCT = {"LOW_STRIDE": 0, "RANK": 0, "BLOCK_K": 0, "ROWS": 0}


def kernel_names(node: Node, state_type: DType) -> Node:
    """`node` with its inputs called as the kernels call them.

    A_log is where A would be, and the scale of a state that is not in int8 is not looked at.
    """
    names = {"A_log": "A", "A_log_scale": "A_scale"}
    inputs = {names.get(name, name): value for name, value in node.inputs.items()}
    if state_type != "i8":
        inputs.pop("state_scale", None)
    return replace(node, inputs=inputs)


def lower(at: Lowering, node: Node) -> None:
    """One program for BLOCK_E channels of a sequence, all of one group; the grid does not depend on
    T.

    A thread has 16 states: 32, with their rates, what is read ahead and the sums of dt, are more
    than 255 registers. 16 channels are the fewest that a product on tensor cores takes.
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
    block_n, each = next_power_of_2(n), x.width // groups[1]
    block_e = max(16, min(1024 // max(16, block_n), next_power_of_2(each)))
    scales = tuple(f"{name}_scale" for name in (*_VALUES, *_WEIGHTS, "state"))
    # the first of two launches finds where parts of a prompt end, the second runs them from there
    cut = at.regime.many and state_type == "f32"
    for ends in (True, False) if cut else (False,):
        at.launch(
            "scan.scan",
            {
                **at.given(node, *_VALUES, *_PRODUCT, *_WEIGHTS, *scales),
                "state": at.state(state, state_type),
                **logs,
                "y": None if ends else at.pointer(y),
                **steering(at),
                **(_parts(at, output, n, x.width) if cut else {}),
            },
            {
                "E": x.width,
                "N": n,
                "BLOCK_E": block_e,
                "BLOCK_N": block_n,
                **_forms(at, node),
                **({"PART": _PART, "PARTS": _PARTS, "ENDS": ends} if cut else {}),
                **({"B_GROUPS": groups[0], "C_GROUPS": groups[1]} if groups[1] > 1 else {}),
            },
            (
                Size(times=groups[1] * cdiv(each, block_e)),
                Size(of="B"),
                Size(times=_PARTS) if cut else ONE,
            ),
            warps=4 if block_n > 64 else 2,
            stages=2,
            settles=not ends,
        )


def steering(at: Lowering) -> Arguments:
    """What says which tokens a scan takes."""
    return {
        "run": at.run(),
        "replay": at.replay(),
        "slots": at.slots(),
        "ancestors": at.ancestors() if at.regime.kind == "tree" else None,
        "tokens": at.size("T"),
        "batch": at.size("B"),
    }


def _parts(at: Lowering, output: str, n: int, channels: int) -> Arguments:
    """Buffers in which parts of a prompt leave their states: as rows, since a part has _PART."""
    widths = {"part_state": n * channels, "part_dt": channels}
    return {
        name: at.pointer(at.new(f"{output}.{name}", "f32", "TB", cdiv(width, _PART)))
        for name, width in widths.items()
    }


def _widened(at: Lowering, node: Node) -> Node:
    """B and C in fp32, the same integers.

    Every channel reads them, and a thread would turn 32 of them to fp32 a token, in a unit that
    does 4 a clock (16 for a multiprocessor): of 370 instructions on sm_87, 62 are saved.
    """
    b, c = at.view(node.inputs["B"]), at.view(node.inputs["C"])
    both = f"{node.outputs['y']}.BC"
    wide = at.new(both, "f32", "TB", 2 * b.width)
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
    at.views |= {f"{both}.{name}": view for name, view in columns.items()}
    return replace(node, inputs={**node.inputs, **{name: f"{both}.{name}" for name in columns}})


def _logs(at: Lowering, node: Node) -> Arguments:
    """What a replay reads; a dt that is made here is kept as it would have been read."""
    views = {name: at.view(node.inputs[name if name in node.inputs else "x"])
             for name in ("x", "dt", "B")}  # fmt: skip
    return logs(at, node, views)


def logs(at: Lowering, node: Node, views: Mapping[str, View]) -> Arguments:
    """The log of each of `views`."""
    state = node.inputs["ssm_state"]
    return {
        f"log_{name}": at.log(state, f"scan_{name}", view.dtype, view.width)
        for name, view in views.items()
    }


def _forms(at: Lowering, node: Node) -> dict[str, Any]:
    """Strides, how many scales there are, and the product that makes dt."""
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
    """How low_dt · dt_weightᵀ is cut: int8 all at once, fp32 so that no register is spilled."""
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
