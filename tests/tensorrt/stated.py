"""Launches for plugins: those of the demo models, and those that op statements imply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import onnx

from edge.launch import CompiledKernel, DType, Size
from edge.ops import Value
from edge.plugins.device.statements import DEVICE_OPS, in_place
from edge.plugins.lowering.plan import walked
from edge.plugins.tensorrt import blob
from edge.plugins.tensorrt.launches import (
    Call,
    Input,
    Kernel,
    NodeLaunches,
    NodeProgram,
    Output,
    Place,
    WorkBuffer,
)
from edge.plugins.tensorrt.nodes import DeviceNode, device_nodes
from tests.tensorrt.plugin_host import Tensor

_BUNDLES = Path(__file__).parents[2] / "apps" / "bundles"

# what varies between runs, and one run
RUN: Mapping[str, int] = {"T": 5, "B": 2, "L": 3, "C": 64, "S": 24, "A": 1}
_FIRST_WIDTH = 101


def run_of(name: str) -> Mapping[str, int]:
    """Return RUN in the symbols of device op `name`: C is the caches' length only for attention."""
    return RUN if "Attention" in name else {s: size for s, size in RUN.items() if s != "C"}


def _widths(values: Iterable[Value], run: Mapping[str, int]) -> dict[str, int]:
    """Return a distinct width for every other dimension of a statement, such as `E` or `K-1`."""
    names = dict.fromkeys(dim for value in values for dim in _shape(value))
    wide = [name for name in names if name not in run and not name.isdigit()]
    return {name: _FIRST_WIDTH + number for number, name in enumerate(wide)}


def _shape(value: Value) -> tuple[str, ...]:
    """Return the shape, with `...` expanded to its rows."""
    return ("T", "B", *value.shape[1:]) if value.shape[:1] == ("...",) else value.shape


def _dtype(value: Value) -> DType:
    return cast(DType, value.dtypes[0])


def stated(name: str) -> NodeLaunches:
    """Return one launch on all tensors of device op `name`, each of its usual type."""
    op = DEVICE_OPS[name]
    run = run_of(name)
    widths = _widths((*op.inputs, *op.outputs), run)
    names = [value.name for value in op.inputs]
    places = in_place(op)
    symbols: dict[str, tuple[int, int]] = {}
    for index, value in enumerate(op.inputs):
        for axis, dim in enumerate(_shape(value)):
            if dim in run:
                symbols.setdefault(dim, (index, axis))

    def dims(value: Value) -> tuple[int | str, ...]:
        return tuple(d if d in run else widths.get(d) or int(d) for d in _shape(value))

    made = tuple(
        Output(_dtype(v), dims(v), names.index(places[v.name]) if v.name in places else -1)
        for v in op.outputs
    )
    everything = [Place("input", i) for i in range(len(op.inputs))]
    everything += [Place("output", i) for i in range(len(op.outputs))]
    rows = "".join(symbol for symbol in "TB" if symbol in symbols)
    return NodeLaunches(
        inputs=tuple(Input(_dtype(v), len(_shape(v))) for v in op.inputs),
        outputs=made,
        symbols=symbols,
        rows=rows,
        workspace=(WorkBuffer(12, 16),),
        kernels=(Kernel(f"{name}.stated-0", 128),),
        calls=(Call(0, (Size(of=rows), Size(), Size()), (*everything, Place("workspace", 0))),),
        programs=(NodeProgram(False, None, (0,)),),
    )


def demonstrated() -> list[tuple[str, NodeLaunches]]:
    """Return device op and launches of the demo models' nodes, without duplicates."""
    found = {}
    for bundle in ("demo", "demo-fp16", "demo-bytes"):
        model = onnx.load(_BUNDLES / bundle / "graphs/ort.onnx", load_external_data=False)
        for node in device_nodes(walked(model, _BUNDLES / bundle)):
            if isinstance(node, DeviceNode):
                found[node.operands.op, node.launches.encode()] = node.launches
    return [(op, launches) for (op, _), launches in found.items()]


def tensors(launches: NodeLaunches, run: Mapping[str, int] = RUN) -> list[Tensor]:
    """Return inputs of a run of these sizes; dimensions without a symbol are 7."""
    shapes = [[7] * given.rank for given in launches.inputs]
    for symbol, (index, axis) in launches.symbols.items():
        shapes[index][axis] = run[symbol]
    return [
        Tensor(given.dtype, tuple(shape))
        for given, shape in zip(launches.inputs, shapes, strict=True)
    ]


def packed(every: Sequence[NodeLaunches]) -> bytes:
    """Return packed kernels for all of them, none of which is real code."""
    keys = {kernel.key for launches in every for kernel in launches.kernels}
    known = CompiledKernel(file="f", symbol="s", shared_bytes=0, scratch=2)
    return blob.pack(87, {key: (known, b"no code of " + key.encode()) for key in keys})
