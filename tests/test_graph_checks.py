"""Graphs that the exporter cannot have written are refused before a library reads them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from edge.errors import BundleError
from edge.plugins.device.library import device_function
from edge.plugins.device.statements import DEVICE_OPS
from edge.plugins.onnx.library import FLAVOURS, function, names
from edge.protobuf import put
from edge.runtime import graph
from edge.runtime.model import resolve

BUNDLES = ("demo", "demo-draft", "demo-bytes", "demo-fp16")
WEIGHTS = {"weights.bin": 1 << 30}


@pytest.fixture(scope="module")
def model() -> bytes:
    return (resolve("demo-fp16") / "graphs/ort.onnx").read_bytes()


def refused(model: ModelProto | bytes, why: str) -> None:
    data = model if isinstance(model, bytes) else model.SerializeToString()
    with pytest.raises(BundleError, match=why):
        graph.check(data, WEIGHTS, "graph")


def test_every_op_that_bodies_use_is_known() -> None:
    def used(nodes: list[NodeProto]) -> Iterator[tuple[str, str]]:
        for node in nodes:
            yield node.domain, node.op_type
            for attribute in node.attribute:
                yield from used(list(attribute.g.node))

    bodies = [function(name, flavour) for flavour in FLAVOURS for name in names(flavour)]
    bodies += [device_function(name) for name in DEVICE_OPS]
    ops = {op for body in bodies for op in used(list(body.node))}
    strange = {(d, o) for d, o in ops if not d.startswith("edge")} - {
        (domain, op.decode()) for domain, known in graph.OPS.items() for op in known
    }
    assert strange == set()


@pytest.mark.parametrize("name", BUNDLES)
def test_graphs_that_ship_pass(name: str) -> None:
    folder = Path(resolve(name))
    sizes = {"weights.bin": (folder / "weights.bin").stat().st_size}
    graph.check((folder / "graphs/ort.onnx").read_bytes(), sizes, name)
    device = (folder / "graphs/tensorrt.onnx").read_bytes()
    graph.check(device, sizes, name)
    bare = ModelProto.FromString(device)
    del bare.functions[:]
    graph.check(bare.SerializeToString(), sizes, name, plugins=True)
    refused(bare, "that the exporter writes")


# -- tensor locations -----------------------------------------------------------------------------


def _initializer(model: ModelProto, tensor: TensorProto) -> None:
    model.graph.initializer.append(tensor)


def _node(tensor: TensorProto, op: str = "Constant") -> NodeProto:
    return helper.make_node(op, [], ["planted"], value=tensor)


def _constant(model: ModelProto, tensor: TensorProto) -> None:
    model.graph.node.append(_node(tensor))


def _function(model: ModelProto, tensor: TensorProto) -> None:
    model.functions[0].node.append(_node(tensor))


def _branch(nodes: list[NodeProto], tensors: list[TensorProto]) -> NodeProto:
    branch = helper.make_graph(nodes, "branch", [], [], tensors)
    return helper.make_node("If", ["yes"], ["out"], then_branch=branch, else_branch=branch)


def _nested(model: ModelProto, tensor: TensorProto) -> None:
    model.graph.node.append(_branch([_branch([_node(tensor)], [])], []))


def _nested_initializer(model: ModelProto, tensor: TensorProto) -> None:
    model.functions[-1].node.append(_branch([], [tensor]))


PLACES = (_initializer, _constant, _function, _nested, _nested_initializer)


def external(location: str, offset: str = "0", length: str = "16") -> TensorProto:
    tensor = TensorProto(name="planted", dims=[4], data_type=1, data_location=1)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=value)
    return tensor


OUTSIDE = (
    "", ".", "/etc/passwd", "../weights.bin", "./weights.bin", "a/../weights.bin", "weights.bin/",
    "*/_ORT_MEM_ADDR_/*", "/proc/self/fd/3", "README.md", "manifest.json", "weights.bin\0",
    "WEIGHTS.BIN", "graphs/ort.onnx", "\u2025/weights.bin", "weights.bin\n",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_lies_in_the_weights(
    place: Callable[[ModelProto, TensorProto], None], model: bytes
) -> None:
    """Each reason alone suffices: the tensor in its right place passes."""
    whole = ModelProto.FromString(model)
    place(whole, external("weights.bin"))
    graph.check(whole.SerializeToString(), WEIGHTS, "graph")

    def planted(tensor: TensorProto, why: str) -> None:
        changed = ModelProto.FromString(model)
        place(changed, tensor)
        refused(changed, why)

    for location in OUTSIDE:
        planted(external(location), "not a file of weights")
    end = str((1 << 30) - 15)
    for offset, length in ((end, "16"), ("0", "15"), ("0", "17"), (str(1 << 40), "16")):
        planted(external("weights.bin", offset, length), "takes 16 bytes")
    numbers = ("-1", "", " 0", "0x0", "1e3", "9" * 30, "٣", "+1", "0\0")
    for offset, length in ((number, "16") for number in numbers):
        planted(external("weights.bin", offset, length), "not a number")
    for keys in ((), ("location",), ("location", "offset"), ("location", "offset", "length") * 2,
                 ("location", "offset", "length", "checksum")):  # fmt: skip
        tensor = external("weights.bin")
        del tensor.external_data[:]
        for key in keys:
            tensor.external_data.add(key=key, value={"location": "weights.bin"}.get(key, "0"))
        planted(tensor, "must have a location")
    both = external("weights.bin")
    both.data_location = TensorProto.DEFAULT
    planted(both, "in the graph and outside")
    for dims in ([-1], [1 << 62, 4], [1 << 39, 1 << 39], [0, 1 << 30], [1] * 17):
        wrong = external("weights.bin")
        wrong.dims[:] = dims
        planted(wrong, "shape|takes|but has an axis")
    for held in ({"raw_data": b"\0" * 15}, {"raw_data": b""}, {}, {"float_data": []}):
        planted(TensorProto(name="t", dims=[4], data_type=1, **held), "does not hold")
    planted(TensorProto(name="t", dims=[1], data_type=8, string_data=[b"x"]), "field 6")


def test_what_libraries_would_read_otherwise(model: bytes) -> None:
    """A duplicate field, which some merge and some do not; unknown fields; truncated numbers."""
    inner = onnx.ModelProto.FromString(model).graph.SerializeToString()
    refused(model + put(7, 2, inner), "graph twice")
    refused(model + put(20, 2, b""), "field 20")
    refused(model + put(1, 2, b"x"), "not an integer")
    refused(model + put(7, 0, 1), "number")
    # number 7 once the upper bits of the key are cut off, as C++ does
    refused(model + b"\xba\x80\x80\x80\x10" + b"\x00", "field")
    for name, field in (("sparse_initializer", 15), ("quantization_annotation", 14)):
        changed = ModelProto.FromString(model)
        getattr(changed.graph, name).add()
        refused(changed, f"field {field}")
    for attribute in ({"sparse_tensor": onnx.SparseTensorProto()}, {"tp": onnx.TypeProto()},
                      {"tensors": [TensorProto()]}, {"graphs": [onnx.GraphProto()]}):  # fmt: skip
        changed = ModelProto.FromString(model)
        changed.graph.node[0].attribute.append(onnx.AttributeProto(name="a", **attribute))
        refused(changed, "field")


SAID_TWICE: tuple[tuple[str, list[dict[str, object]]], ...] = (
    ("an attribute twice", [{"name": "axis", "type": 2, "i": 0}, {"name": "axis", "type": 2}]),
    ("an attribute twice", [{"name": "value_int", "type": 2, "i": 1},
                            {"name": "value_ints", "type": 7, "ints": [2]}]),
    ("two values or types", [{"name": "value", "type": 2, "i": 1, "ints": [2]}]),
    ("two values or types", [{"name": "value_int", "type": 7, "i": 1}]),
    ("two values or types", [{"name": "value_int", "i": 1}]),
    ("two values or types", [{"name": "value_int", "type": 2, "i": 1, "ref_attr_name": "a"}]),
)  # fmt: skip


@pytest.mark.parametrize(("why", "said"), SAID_TWICE)
def test_an_attribute_says_one_thing(why: str, said: list[dict[str, object]], model: bytes) -> None:
    changed = ModelProto.FromString(model)
    node = NodeProto(op_type="Constant", output=["planted"])
    node.attribute.extend(onnx.AttributeProto(**each) for each in said)
    changed.graph.node.append(node)
    refused(changed, why)
    inside = ModelProto.FromString(model)
    inside.functions[0].node.append(_branch([_branch([node], [])], []))
    refused(inside, why)


def test_a_tensor_says_its_numbers_once(model: bytes) -> None:
    """Libraries differ in which they take."""
    small = {"name": "planted", "dims": [1]}
    for place in PLACES:
        for held in (
            {"data_type": 6, "int32_data": [1000], "int64_data": [1]},
            {"data_type": 7, "int32_data": [1000]},
            {"data_type": 7, "raw_data": bytes(8), "int64_data": [1]},
            {"data_type": 1, "raw_data": bytes(4), "float_data": [1.0]},
        ):
            changed = ModelProto.FromString(model)
            place(changed, TensorProto(**small, **held))
            refused(changed, "not of its type")


def test_a_name_is_of_one_value(model: bytes) -> None:
    tensor = onnx.numpy_helper.from_array(np.array([1]), "planted")
    again = helper.make_node("Identity", ["planted"], ["planted"])
    inputs = ModelProto.FromString(model)
    name = inputs.graph.input[0].name
    inputs.graph.node.append(helper.make_node("Identity", ["planted"], [name]))
    refused(inputs, "two values are called")
    for place in PLACES:
        for more in (tensor, again):
            changed = ModelProto.FromString(model)
            place(changed, tensor)
            if isinstance(more, TensorProto):
                place(changed, more)
            else:
                changed.graph.node.append(again)
                changed.functions[0].node.extend([again, again])
            if place in (_nested, _nested_initializer) and more is tensor:
                changed.functions[0].node.append(_branch([_node(tensor), _node(tensor)], [tensor]))
            refused(changed, "two values are called")


# -- what is computed -----------------------------------------------------------------------------


def called(name: str, *calls: str) -> onnx.FunctionProto:
    nodes = [
        helper.make_node(call, ["x"], [f"y{i}"], domain="edge") for i, call in enumerate(calls)
    ]
    opset = [helper.make_opsetid("", 21)]
    return helper.make_function("edge", name, ["x"], ["y0"], nodes, opset)


def with_functions(model: bytes, *functions: onnx.FunctionProto) -> ModelProto:
    changed = ModelProto.FromString(model)
    changed.functions.extend(functions)
    changed.graph.node.add(op_type=functions[0].name, domain="edge", input=["x"], output=["z"])
    return changed


def test_functions_do_not_call_themselves_nor_explode(model: bytes) -> None:
    refused(with_functions(model, called("A", "A")), "calls itself")
    refused(with_functions(model, called("A", "B"), called("B", "C"), called("C", "A")), "itself")
    doubling = [called(f"F{i}", f"F{i + 1}", f"F{i + 1}") for i in range(60)]
    refused(with_functions(model, *doubling, called("F60")), "more than")
    chain = [called(f"F{i}", f"F{i + 1}") for i in range(3000)]
    graph.check(with_functions(model, *chain, called("F3000")).SerializeToString(), WEIGHTS, "g")
    refused(with_functions(model, called("A"), called("A")), "twice")
    shadow = helper.make_function("", "Add", ["x"], ["y"], [], [helper.make_opsetid("", 21)])
    changed = ModelProto.FromString(model)
    changed.functions.append(shadow)
    refused(changed, "not this project's")


@pytest.mark.parametrize(
    ("domain", "op"),
    [*product([""], ["Tile", "RandomNormal", "Resize", "StringConcat", "Optional", "PyOp"]),
     ("com.microsoft", "Irfft"), ("ai.onnx.ml", "TreeEnsemble"), ("custom", "Add"), ("edge", "No"),
     ("edge.device", "Embed")],
)  # fmt: skip
def test_only_ops_that_the_exporter_writes(domain: str, op: str, model: bytes) -> None:
    node = helper.make_node(op, [], ["out"], domain=domain)
    for place in (lambda m: m.graph.node, lambda m: m.functions[0].node):
        changed = ModelProto.FromString(model)
        place(changed).append(node)
        refused(changed, "that the exporter writes")
    changed = ModelProto.FromString(model)
    changed.graph.node.append(_branch([node], []))
    refused(changed, "that the exporter writes")


def test_loops_have_as_many_rounds_as_a_tensor_has_rows(model: bytes) -> None:
    body = helper.make_graph([], "body", [], [])
    counts = ([], [""], ["tokens"], ["const.1"], ["logits"])
    for inputs in counts:
        changed = ModelProto.FromString(model)
        changed.graph.node.append(helper.make_node("Loop", inputs, ["out"], body=body))
        refused(changed, "once for each row")


def _graph(name: str, nodes: list[NodeProto], *inputs: str) -> onnx.GraphProto:
    values = [helper.make_tensor_value_info(i, TensorProto.INT64, None) for i in inputs]
    return helper.make_graph(nodes, name, values, [])


def _loop(count: str) -> NodeProto:
    return helper.make_node("Loop", [count, "", "tokens"], ["looped"], body=_graph("body", []))


SIZE = helper.make_node("Size", ["tokens"], ["n"])
ENDLESS = helper.make_node("Constant", [], ["n"], value_int=1 << 62)


def _if(then: list[NodeProto], other: list[NodeProto]) -> list[NodeProto]:
    branches = {"then_branch": _graph("then", then), "else_branch": _graph("else", other)}
    return [helper.make_node("If", ["tokens"], ["chosen"], **branches)]


def _scan(body: list[NodeProto], *inputs: str) -> NodeProto:
    return helper.make_node(
        "Scan", ["tokens"], ["scanned"], body=_graph("s", body, *inputs), num_scan_inputs=1
    )


@pytest.mark.parametrize(
    "nodes",
    [
        _if([SIZE], [ENDLESS, _loop("n")]),
        _if([ENDLESS, _loop("n")], [SIZE]),
        [SIZE, *_if([ENDLESS, _loop("n")], [])],
        [ENDLESS, *_if([SIZE], [_loop("n")])],
        [SIZE, _scan([_loop("n")], "n")],
        [*_if([SIZE], []), _loop("n")],
        [ENDLESS, _scan([SIZE]), helper.make_node("Squeeze", ["n"], ["m"]), _loop("m")],
        [helper.make_node("Size", ["tokens"], [""]), _loop("")],
        [helper.make_node("Shape", ["tokens"], ["n"], start=0, end=1), _loop("n")],
    ],
    ids=["else", "then", "redefined", "around", "input", "inside", "squeezed", "unnamed", "empty"],
)
def test_a_count_is_known_by_its_name_where_it_is_seen(
    nodes: list[NodeProto], model: bytes
) -> None:
    """Graphs beside each other may use one name twice, so it says nothing about the other."""
    for place in (lambda m: m.graph.node, lambda m: m.functions[0].node):
        changed = ModelProto.FromString(model)
        place(changed).extend(nodes)
        refused(changed, "once for each row")
    for good in ([SIZE, *_if([_loop("n")], [_loop("n")])], _if([ENDLESS], [SIZE, _loop("n")])):
        changed = ModelProto.FromString(model)
        changed.graph.node.extend(good)
        graph.check(changed.SerializeToString(), WEIGHTS, "graph")


def test_a_graph_is_not_handed_to_a_function(model: bytes) -> None:
    """There, a name inside it would be one of the function's own values."""
    body = _graph("body", [_loop("n")])
    own = helper.make_node("Loop", ["n"], ["out"])
    own.attribute.add(name="body", ref_attr_name="body", type=onnx.AttributeProto.GRAPH)
    for nodes in (
        [SIZE, helper.make_node(ModelProto.FromString(model).functions[1].name, [], ["handed"],
                                domain="edge", body=body)],
        [SIZE, own],
        [SIZE, helper.make_node("Identity", ["n"], ["m"], body=body)],
        [SIZE, helper.make_node("Loop", ["n"], ["out"], body=1)],
        [SIZE, helper.make_node("Loop", ["n"], ["out"], more=body)],
    ):  # fmt: skip
        changed = ModelProto.FromString(model)
        changed.functions[0].node.extend(nodes)
        refused(changed, "graph where none belongs")


def test_constants_of_nested_graphs_are_seen(model: bytes) -> None:
    huge = onnx.numpy_helper.from_array(np.array([1 << 40], np.int64), "huge")
    said = helper.make_node("Constant", [], ["huge"], value=huge)
    fill = helper.make_node("ConstantOfShape", ["huge"], ["filled"])
    nested = helper.make_graph([fill], "nested", [], [], [huge])
    count = helper.make_node("Constant", [], ["huge"], value_int=1 << 40)
    counted = helper.make_node("Range", ["tokens", "huge", "tokens"], ["filled"])
    for nodes in (
        [helper.make_node("Scan", ["tokens"], ["s"], body=nested, num_scan_inputs=1)],
        _if([said, *_if([fill], [])], []),
        [count, counted],
        _if([count], [count, counted]),
    ):
        changed = ModelProto.FromString(model)
        changed.graph.node.extend(nodes)
        refused(changed, "fills more")
    small = helper.make_node("Constant", [], ["huge"], value_ints=[2])
    changed = ModelProto.FromString(model)
    changed.graph.node.extend(_if([said], [small, fill]))
    graph.check(changed.SerializeToString(), WEIGHTS, "graph")


# -- sizes ----------------------------------------------------------------------------------------


def test_nodes_and_functions_have_few_names(model: bytes) -> None:
    many = [f"name{i}" for i in range(300)]
    for nodes in ([helper.make_node("Split", ["tokens"], many)],
                  [helper.make_node("Sum", ["tokens"] * 300, ["sum"])]):  # fmt: skip
        changed = ModelProto.FromString(model)
        changed.graph.node.extend(nodes)
        refused(changed, "more than 256 inputs or outputs")
    for side in ("input", "output"):
        changed = ModelProto.FromString(model)
        getattr(changed.functions[0], side).extend(many)
        refused(changed, "more than 256 inputs or outputs")


def test_a_tensor_that_a_node_fills_is_bounded(model: bytes) -> None:
    for op, shape in product(("ConstantOfShape", "Expand"), ([1 << 31], [40_000, 40_000])):
        tensor = onnx.numpy_helper.from_array(np.array(shape, np.int64), "planted")
        plain = helper.make_tensor("planted", TensorProto.INT64, [len(shape)], shape)
        for each, how in product((tensor, plain), (_initializer, _constant, _function)):
            changed = ModelProto.FromString(model)
            how(changed, each)
            place = changed.functions[0].node if how is _function else changed.graph.node
            place.append(helper.make_node(op, ["planted", "planted"], ["filled"]))
            refused(changed, "fills more")


def test_nesting_is_bounded(model: bytes) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    for _ in range(20):
        inner = helper.make_graph([node], "inner", [], [])
        node = helper.make_node("Scan", ["x"], ["y"], body=inner, num_scan_inputs=1)
    changed = ModelProto.FromString(model)
    changed.graph.node.append(node)
    refused(changed, "deep")


def test_damage_is_told_and_nothing_else(model: bytes) -> None:
    """Truncated, flipped and shuffled bytes end in BundleError or pass."""
    chosen = random.Random(0)
    for _ in range(300):
        data = bytearray(model[: chosen.choice((len(model), chosen.randrange(len(model))))])
        for _ in range(chosen.randrange(4)):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        with contextlib.suppress(BundleError):
            graph.check(bytes(data), WEIGHTS, "graph")
