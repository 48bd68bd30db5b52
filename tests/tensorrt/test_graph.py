"""The device graph against the launch plan it was made from: nothing lost, nothing added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge.launch import Launch, LaunchPlan, Pointer, Program
from edge.plugins.device.statements import DEVICE_OPS, in_place, viewable
from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.lowering.plan import LoweringError, walked
from edge.plugins.tensorrt.graph import device_graph, inlined
from edge.plugins.tensorrt.launches import Call, NodeLaunches, Place
from tests.lowered_models import CASES
from tests.tensorrt.graphs import Case, Made, attributes, launches, made

# kernels that a plan launches for nodes of ONNX's own
_STANDARD = {"rows.add": "Add", "rows.gather_columns": "Gather", "rows.concat": "Concat"}
_ITEM = {"f32": 4, "f16": 2, "i8": 1, "u8": 1, "i32": 4, "i64": 8}
_TYPES = {
    TensorProto.FLOAT: "f32", TensorProto.FLOAT16: "f16", TensorProto.INT8: "i8",
    TensorProto.INT32: "i32", TensorProto.INT64: "i64",
}  # fmt: skip
# recipes whose graphs have the nodes of another's: w4a16, w8a8
_ALIKE = ("w8", "w4", "w8a8-static", "w8a8-smoothquant")
PLANNED = [case for case in CASES if case[1] not in _ALIKE]
# one model for every kind of layer: all of them in all recipes are twenty times as many
SOME: tuple[Case, ...] = (
    ("mamba1", "fp16", None),
    ("mamba1 odd", "w4a8", None),
    ("mamba1", "w8a8", "int8"),
    ("mamba2 groups", "w8a8-dynamic", None),
    ("mamba2 with mlp", "w8a8-o", None),
    ("all", "w4a16", None),
    ("parallel", "w8a8", None),
)


def program_of(node: NodeLaunches, kind: str, rows: int) -> tuple[int, ...]:
    """Return the calls of a run for the number of rows of a chain or a tree."""
    trees = [program for program in node.programs if program.tree]
    fitting = trees if kind == "tree" and trees else [p for p in node.programs if not p.tree]
    return next(p.calls for p in fitting if p.max_rows is None or rows <= p.max_rows)


def launched(plan: LaunchPlan, program: Program) -> Iterator[tuple[Any, ...]]:
    """Return the plan's launches, except those of nodes of ONNX's own."""
    for index in program.order:
        launch = plan.launches[index]
        variant = plan.variants[launch.variant]
        if variant.kernel not in _STANDARD:
            yield variant.key, 32 * variant.warps, launch.grid, named(plan, launch)


def named(plan: LaunchPlan, launch: Launch) -> tuple[Any, ...]:
    def bytes_of(pointer: Pointer) -> int:
        held = {**plan.values, **plan.inputs, **plan.weights, **plan.inline, **plan.logs}
        return pointer.at and pointer.at * _ITEM[held[pointer.name].dtype]

    return tuple(
        (one.name, bytes_of(one)) if isinstance(one, Pointer) else one for one in launch.arguments
    )


def called(found: Made, kind: str, rows: int) -> Iterator[tuple[Any, ...]]:
    """Return the plugins' launches, in their order; workspace is named (node, index)."""
    for node in found.nodes:
        held = launches(node)
        for index in program_of(held, kind, rows):
            call = held.calls[index]
            kernel = held.kernels[call.kernel]
            yield kernel.key, kernel.threads, call.grid, placed(node, held, call)


def placed(node: NodeProto, held: NodeLaunches, call: Call) -> tuple[Any, ...]:
    def name(place: Place) -> object:
        if place.space == "workspace":
            return node.name, place.index
        if place.space == "output" and held.outputs[place.index].alias < 0:
            return node.output[place.index]
        # for an in-place tensor the launch points to the output
        assert place.space == "output" or f"{node.input[place.index]}.out" not in node.output
        index = held.outputs[place.index].alias if place.space == "output" else place.index
        return node.input[index]

    return tuple((name(a), a.at) if isinstance(a, Place) else a for a in call.arguments)


def renamed(expected: Sequence[tuple[Any, ...]], found: Sequence[tuple[Any, ...]]) -> None:
    """Return the same launches, where each name of the workspace stands for one value that is not a
    tensor.
    """
    names: dict[object, object] = {}
    for (*launch, arguments), (*call, places) in zip(expected, found, strict=True):
        assert launch == call
        for one, other in zip(arguments, places, strict=True):
            if isinstance(one, tuple) and isinstance(other[0], tuple):
                assert names.setdefault(other[0], one[0]) == one[0]
                other = (one[0], other[1])
            assert one == other
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_nodes_launch_what_the_plan_does(case: Case) -> None:
    """All kernels have the same arguments in the same order, for each kind of run."""
    found = made(*case)
    for program in found.plan.programs[:-1]:
        rows = program.max_rows or 17
        expected = list(launched(found.plan, program))
        renamed(expected, list(called(found, program.kind, rows)))
        kernels = (found.plan.variants[found.plan.launches[i].variant] for i in program.order)
        standard = Counter(_STANDARD.get(variant.kernel) for variant in kernels)
        assert +standard - Counter({None: standard[None]}) == Counter(
            n.op_type for n in found.device.graph.node if not n.domain and n.op_type != "Slice"
        )


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_nodes_are_as_they_are_stated(case: Case) -> None:
    found = made(*case)
    graph = found.device.graph
    tensors = {
        v.name: (_TYPES[v.type.tensor_type.elem_type], dims(v))
        for v in (*graph.input, *graph.output)
    }
    tensors |= {p.name: (_TYPES[p.data_type], tuple(p.dims)) for p in graph.initializer}
    values = found.plan.values
    tensors |= {
        name: (values[name].dtype, (*values[name].elements.of, values[name].elements.times))
        for node in graph.node
        for name in node.output
        if not node.domain
    }
    for node in found.nodes:
        op, held, given = DEVICE_OPS[node.op_type], launches(node), attributes(node)
        assert len(node.input) == len(op.inputs) == len(held.inputs)
        assert len(node.output) == len(held.outputs)
        assert given.keys() - {"carries"} == {a.name for a in op.attributes} | {
            "launches", "plugin_version", "plugin_namespace",
        }  # fmt: skip
        tensors |= {
            name: ("i8" if output.dtype == "u8" else output.dtype, output.dims)
            for name, output in zip(node.output, held.outputs, strict=True)
        }
        for value, name, read in zip(op.inputs, node.input, held.inputs, strict=True):
            dtype, shape = tensors[name]
            assert dtype in value.dtypes and dtype == ("i8" if read.dtype == "u8" else read.dtype)
            assert read.rank == len(shape)
            assert "..." in value.shape or len(shape) == len(value.shape), (node.name, name)
            if value.name in viewable(op):
                assert given[f"{value.name}_start"] + given[f"{value.name}_width"] <= shape[-1]
        kept = in_place(op)
        places = [value.name for value in op.inputs]
        for value, output in zip(op.outputs, held.outputs, strict=False):
            assert output.dtype in value.dtypes
            alias = places.index(kept[value.name]) if value.name in kept else -1
            assert output.alias == alias
        for symbol, (index, axis) in held.symbols.items():
            assert tensors[node.input[index]][1][axis] == symbol
    assert [node.name for node in found.nodes if "carries" in attributes(node)] == [
        found.nodes[0].name
    ]


def dims(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim)


def check(model: ModelProto, path: Path) -> None:
    """Run ONNX's own checker on the graph, beside its weights."""
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(path)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_every_reader_finds_valid_onnx(case: Case) -> None:
    found = made(*case)
    for name, model in (
        ("whole", found.device), ("inlined", inlined(found.device)),
    ):  # fmt: skip
        check(model, found.folder / f"{name}.onnx")
    flat = inlined(found.device)
    assert not flat.functions and {node.domain for node in flat.graph.node} == {""}


@pytest.mark.parametrize("case", SOME[:2], ids=str)
def test_the_same_graph_gives_the_same_bytes(case: Case) -> None:
    found = made(*case)
    model = onnx.load(found.graph, load_external_data=False)
    again = device_graph(model, walked(model, found.folder))
    first = found.device.SerializeToString(deterministic=True)
    assert again.SerializeToString(deterministic=True) == first


@pytest.mark.parametrize("case", SOME, ids=str)
def test_weights_lie_where_they_lay(case: Case) -> None:
    """The same bytes of weights.bin; packed ones are declared int8."""
    found = made(*case)
    stored = {p.name: p for p in onnx.load(found.graph, load_external_data=False).graph.initializer}
    for proto in found.device.graph.initializer:
        before = stored.get(proto.name)
        if before is None:  # where a Slice starts or ends
            assert numpy_helper.to_array(proto).dtype == np.int64
            continue
        assert list(before.external_data) == list(proto.external_data)
        assert before.dims == proto.dims
        if before.data_type == TensorProto.UINT8:
            assert proto.data_type == TensorProto.INT8
        else:
            assert before.SerializeToString() == proto.SerializeToString()


def test_what_only_a_step_uses_takes_no_room_in_a_prefill() -> None:
    """Attention's parts need buffers for at most 16 rows, and none for a longer chunk."""
    node = next(n for n in made("all", "fp32").nodes if n.op_type == "RotaryAttention")
    rotated, mixes, peaks = launches(node).workspace
    assert rotated.max_rows is None and mixes.max_rows == peaks.max_rows == 16
    assert mixes.row_bytes > 4 * rotated.row_bytes


def test_trees_have_programs_where_they_run_otherwise() -> None:
    with_trees = {
        node.op_type
        for node in made("all", "fp32").nodes
        if any(program.tree for program in launches(node).programs)
    }
    assert with_trees == {"SelectiveScanDt", "SelectiveScanHeads", "RotaryAttention"}


def test_columns_of_a_value_are_sliced_for_nodes_of_onnx() -> None:
    found = made("mamba2", "fp32")
    model = onnx.load(found.graph, load_external_data=False)
    # the gate z, some columns of zxbcdt, is doubled before it gates
    gated = next(n for n in model.graph.node if n.op_type.startswith("GatedRMSNorm"))
    at = list(model.graph.node).index(gated)
    z = gated.input[1]
    gated.input[1] = "doubled"
    model.graph.node.insert(at, helper.make_node("Add", [z, z], ["doubled"], name="twice"))
    device = device_graph(model, walked(model, found.folder))
    added = next(n for n in device.graph.node if n.op_type == "Add")
    cut = next(n for n in device.graph.node if n.op_type == "Slice")
    assert list(added.input) == [cut.output[0]] * 2 and cut.input[0] == "layers.0.zxbcdt"
    bounds = {p.name: numpy_helper.to_array(p).tolist() for p in device.graph.initializer
              if p.name in cut.input}  # fmt: skip
    assert [bounds[name] for name in cut.input[1:]] == [[0], [128], [-1]]
    check(device, found.folder / "sliced.onnx")


def test_an_op_without_a_kernel_is_named() -> None:
    found = made("mamba1", "fp16")
    model = onnx.load(found.graph, load_external_data=False)
    without = {op: lower for op, lower in LOWER.items() if op != "SelectiveScan"}
    with pytest.raises(LoweringError, match="no kernel runs SelectiveScan") as refused:
        walked(model, found.folder, ops=without)
    assert refused.value.field == "layers.0.scan.SelectiveScan"


def test_columns_that_an_op_does_not_take_are_refused() -> None:
    """Norms read whole rows: a plugin given only some columns would norm others."""
    found = made("mamba2", "fp32")
    model = onnx.load(found.graph, load_external_data=False)
    norm = next(n for n in model.graph.node if n.op_type == "RMSNorm")
    at = list(model.graph.node).index(norm)
    widths = numpy_helper.from_array(np.array([32, 32], np.int64), "halves")
    model.graph.initializer.append(widths)
    x, norm.input[0] = norm.input[0], "first"
    split = helper.make_node("Split", [x, "halves"], ["first", "second"], name="split", axis=-1)
    model.graph.node.insert(at, split)
    with pytest.raises(LoweringError, match="reads some columns of 'embedded' as x") as refused:
        device_graph(model, walked(model, found.folder))
    assert refused.value.field == norm.name
