"""How `kernels.scan` is called: Mamba-1's selective scan on fp32 or int8 values.

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
columns of its channels, by what `kernels.linear_int8` and `kernels.linear` do for few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edge.launch import Argument, DType, Size
from edge.ops.quantized_recurrent import SELECTIVE_SCAN_INT8
from edge.ops.recurrent import SELECTIVE_SCAN
from edge.plugins.lowering.context import (
    ONE,
    Arguments,
    Lower,
    Lowering,
    Node,
    View,
    cdiv,
    next_power_of_2,
)

_VALUES = ("x", "dt", "B", "C", "z")
_WEIGHTS = ("A", "D", "dt_bias")
_SCALED = (*_VALUES, *_WEIGHTS)
_LOGGED = ("x", "dt", "B")
_PRODUCT = ("low_dt", "dt_weight")
_INT8_PRODUCT = ("low_dt", "low_dt_scale", "dt_weight", "dt_weight_scale")
_STATES: Mapping[int, DType] = {32: "f32", 16: "f16", 8: "i8"}
_WIDENED_ROWS = 64
# tokens that make a part of a prompt worth its own program, and the most parts
_PART, _PARTS = 32, 16
_NO_PRODUCT = {"LOW_STRIDE": 0, "RANK": 0, "BLOCK_K": 0, "ROWS": 0}


@dataclass(frozen=True)
class _Scan:
    """A node's inputs by the kernel's names; "" where it has none of that name."""

    given: Mapping[str, str]
    views: Mapping[str, View]
    int8: bool
    state_type: DType

    @property
    def channels(self) -> int:
        return self.views["x"].width


def _scan_of(at: Lowering, node: Node) -> _Scan:
    int8, joined = "Int8" in node.op, node.op.endswith("Dt")
    names = [v.name for v in (SELECTIVE_SCAN_INT8 if int8 else SELECTIVE_SCAN).inputs]
    if joined:
        names += _INT8_PRODUCT if int8 else _PRODUCT
    given = dict(zip(names, node.inputs, strict=True))
    if int8:
        given |= {"A": given["A_log"], "A_scale": given["A_log_scale"]}
    state_type = _STATES[node.attributes["state_bits"]] if int8 else "f32"
    if state_type != "i8":
        given.pop("state_scale", None)
    present = [name for name in (*_VALUES, "low_dt") if name in given]
    if joined:
        present.remove("dt")
    return _Scan(given, {name: at.view(given[name]) for name in present}, int8, state_type)


def lower_scan(at: Lowering, node: Node) -> None:
    """One program for BLOCK_E channels of a sequence; the grid does not depend on T.

    A thread has 16 states: 32, with their rates, what is read ahead and the sums of dt, are more
    than 255 registers. 16 channels are the fewest that a product on tensor cores takes.
    """
    scan = _scan_of(at, node)
    logs = _logs(at, scan)
    if scan.int8 and at.regime.many:
        scan = _widened(at, scan, node.outputs[0])
    y = at.new(node.outputs[0], "f32", "TB", scan.channels)
    n = scan.views["B"].width
    block_n = next_power_of_2(n)
    block_e = max(16, 1024 // max(16, block_n))
    # the first of two launches finds where parts of a prompt end, the second runs them from there
    cut = at.regime.many and scan.state_type == "f32"
    for ends in (True, False) if cut else (False,):
        at.launch(
            "scan.scan",
            {
                **_inputs(at, scan),
                "state": at.state(scan.given["ssm_state"], scan.state_type),
                **logs,
                "y": None if ends else at.pointer(y),
                "run": at.run(),
                "replay": at.replay(),
                "slots": at.slots(),
                "ancestors": at.ancestors() if at.regime.kind == "tree" else None,
                "tokens": at.size("T"),
                "batch": at.size("B"),
                **(_parts(at, node.outputs[0], n, scan.channels) if cut else {}),
            },
            {
                "E": scan.channels,
                "N": n,
                "BLOCK_E": block_e,
                "BLOCK_N": block_n,
                **_forms(at, scan),
                **({"PART": _PART, "PARTS": _PARTS, "ENDS": ends} if cut else {}),
            },
            (
                Size(times=cdiv(scan.channels, block_e)),
                Size(of="B"),
                Size(times=_PARTS) if cut else ONE,
            ),
            warps=4 if block_n > 64 else 2,
            stages=2,
            settles=not ends,
        )


def _parts(at: Lowering, output: str, n: int, channels: int) -> Arguments:
    """Where parts of a prompt leave their states: as rows, since a part has _PART of them."""
    widths = {"part_state": n * channels, "part_dt": channels}
    return {
        name: at.pointer(at.new(f"{output}.{name}", "f32", "TB", cdiv(width, _PART)))
        for name, width in widths.items()
    }


def _widened(at: Lowering, scan: _Scan, output: str) -> _Scan:
    """B and C in fp32, the same integers.

    Every channel reads them, and a thread would turn 32 of them to fp32 a token, in a unit that
    does 4 a clock (16 for a multiprocessor): of 370 instructions on sm_87, 62 are saved.
    """
    b, c = scan.views["B"], scan.views["C"]
    wide = at.new(f"{output}.BC", "f32", "TB", 2 * b.width)
    at.launch(
        "scan.widen",
        {"B": at.pointer(b), "C": at.pointer(c), "wide": at.pointer(wide), "rows": at.size("TB")},
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
    return replace(scan, views={**scan.views, **columns})


def _inputs(at: Lowering, scan: _Scan) -> Arguments:
    """Values, weights and scales, in the kernel's order."""

    def constant(name: str) -> tuple[Argument, str] | None:
        return at.pointer(at.constant(scan.given[name])) if name in scan.given else None

    def value(name: str) -> tuple[Argument, str] | None:
        return at.pointer(scan.views[name]) if name in scan.views else None

    return {
        **{name: value(name) for name in (*_VALUES, "low_dt")},
        **{name: constant(name) for name in ("low_dt_scale", "dt_weight", "dt_weight_scale")},
        **{name: constant(name) for name in _WEIGHTS},
        **{f"{name}_scale": constant(f"{name}_scale") for name in (*_SCALED, "state")},
    }


def _logs(at: Lowering, scan: _Scan) -> Arguments:
    """What a replay reads; a dt that is made here is kept as it would have been read."""
    prefix = scan.given["ssm_state"].removesuffix("ssm_state")
    x = scan.views["x"]
    return {
        f"log_{name}": at.log(f"{prefix}scan_{name}", view.dtype, view.width)
        for name, view in ((name, scan.views.get(name, x)) for name in _LOGGED)
    }


def _forms(at: Lowering, scan: _Scan) -> dict[str, Any]:
    """Strides, how many scales there are, and the product that makes dt."""

    def scales(name: str) -> int:
        scale = scan.given.get(f"{name}_scale")
        return 0 if scale is None else at.constant(scale).size

    low = scan.views.get("low_dt")
    strides = {f"{name.upper()}_STRIDE": scan.views[name].stride if name in scan.views else 0
               for name in _VALUES}  # fmt: skip
    return {
        **strides,
        **{f"{name.upper()}_SCALES": scales(name) for name in (*_VALUES, "state", "dt_weight")},
        **(_NO_PRODUCT if low is None else _product(at, low, scan)),
    }


def _product(at: Lowering, low: View, scan: _Scan) -> dict[str, int]:
    """How low_dt · dt_weightᵀ is cut: int8 all at once, fp32 so that no register is spilled."""
    few = at.regime.max_rows is not None and at.regime.max_rows <= 8
    columns = {"i8": 256, "f16": 64, "f32": 32}[at.constant(scan.given["dt_weight"]).dtype]
    block_k = min(columns, max(64, next_power_of_2(low.width)))
    return {
        "LOW_STRIDE": low.stride,
        "RANK": low.width,
        "BLOCK_K": block_k,
        "ROWS": 8 if few else 16,
    }


LOWER: dict[str, Lower] = dict.fromkeys(
    ("SelectiveScan", "SelectiveScanInt8", "SelectiveScanDt", "SelectiveScanInt8Dt"), lower_scan
)
