"""How `kernels.scan` is called: Mamba-1's selective scan on fp32 or int8 values.

The state [B, N, E] lies along the channels, so a warp takes 32 of them and a thread all N states of
one: the sum over N, and everything that is one a channel, needs no other thread. Two warps a
program: Mamba 2.8B, E 5120, has 80 programs, 10 on each of an Orin Nano's 8 multiprocessors (16 is
the most there), and 5 warps for each of its schedulers.

Tokens are taken one after the other, also in prefill. A state that is rounded after every token
allows nothing else, and for an fp32 state the other ways (a scan by associativity, or chunks) do
two to three times the work and give other bits in a chunk than in a step. What a token costs is
written in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge.launch import Argument, DType, Size
from edge.ops.quantized_recurrent import SELECTIVE_SCAN_INT8
from edge.ops.recurrent import SELECTIVE_SCAN
from edge.plugins.lowering.context import Lower, Lowering, Node, cdiv, next_power_of_2

_VALUES = ("x", "dt", "B", "C", "z")
_WEIGHTS = ("A", "D", "dt_bias")
_SCALED = (*_VALUES, *_WEIGHTS)
_STATES: Mapping[int, DType] = {32: "f32", 16: "f16", 8: "i8"}
_STATES_A_THREAD = 32


def lower_scan(at: Lowering, node: Node) -> None:
    """One program for BLOCK_E channels of a sequence; the grid does not depend on T."""
    int8 = node.op == "SelectiveScanInt8"
    op = SELECTIVE_SCAN_INT8 if int8 else SELECTIVE_SCAN
    given = dict(zip((v.name for v in op.inputs), node.inputs, strict=True))
    given["A"] = given.get("A_log", given.get("A", ""))
    given["A_scale"] = given.get("A_log_scale", "")
    views = {name: at.view(given[name]) for name in _VALUES}
    channels, n = views["x"].width, views["B"].width
    y = at.new(node.outputs[0], "f32", "TB", channels)
    state_type = _STATES[node.attributes["state_bits"]] if int8 else "f32"
    scales = {f"{name}_scale": given[f"{name}_scale"] for name in _SCALED} if int8 else {}
    if state_type == "i8":
        scales["state_scale"] = given["state_scale"]
    prefix = given["ssm_state"].removesuffix("ssm_state")
    pointers: dict[str, tuple[Argument, str] | None] = {
        **{name: at.pointer(view) for name, view in views.items()},
        **{name: at.pointer(at.constant(given[name])) for name in _WEIGHTS},
        **{f"{name}_scale": None for name in (*_SCALED, "state")},
        **{name: at.pointer(at.constant(value)) for name, value in scales.items()},
        "state": at.state(given["ssm_state"], state_type),
        **{
            f"log_{name}": at.log(f"{prefix}scan_{name}", views[name].dtype, views[name].width)
            for name in ("x", "dt", "B")
        },
        "y": at.pointer(y),
        "run": at.run(),
        "replay": at.replay(),
        "slots": at.slots(),
        "ancestors": at.ancestors() if at.regime.kind == "tree" else None,
        "tokens": at.size("T"),
        "batch": at.size("B"),
    }
    block_n = next_power_of_2(n)
    block_e = 64 * _STATES_A_THREAD // max(_STATES_A_THREAD, block_n)
    at.launch(
        "scan.scan",
        pointers,
        {
            "E": channels,
            "N": n,
            "BLOCK_E": block_e,
            "BLOCK_N": block_n,
            **{f"{name.upper()}_STRIDE": view.stride for name, view in views.items()},
            **{
                f"{name.upper()}_SCALES": at.constant(scales[f"{name}_scale"]).size
                if f"{name}_scale" in scales
                else 0
                for name in (*_VALUES, "state")
            },
        },
        (Size(times=cdiv(channels, block_e)), Size(of="B")),
        warps=2,
        stages=1,
        settles=True,
    )


LOWER: dict[str, Lower] = {"SelectiveScan": lower_scan, "SelectiveScanInt8": lower_scan}
