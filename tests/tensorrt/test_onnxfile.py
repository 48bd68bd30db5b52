"""ONNX files read without the onnx package, beside what the package reads."""

from __future__ import annotations

import pytest
from onnx import ModelProto, TensorProto

from edge.errors import BundleError
from edge.ops.device import DEVICE_DOMAIN
from edge.runtime.model import EMBEDDED, resolve
from edge.runtime.tensorrt import onnxfile

_TYPES = {"f32": "FLOAT", "f16": "FLOAT16", "i8": "INT8", "i32": "INT32", "i64": "INT64"}


@pytest.mark.parametrize("name", EMBEDDED)
def test_inputs_and_outputs_are_what_onnx_reads(name: str) -> None:
    data = (resolve(name) / "graphs" / "tensorrt.onnx").read_bytes()
    ours, theirs = onnxfile.read(data, "graph"), ModelProto.FromString(data).graph
    for found, values in ((ours.inputs, theirs.input), (ours.outputs, theirs.output)):
        assert list(found) == [value.name for value in values]
        for value in values:
            tensor = value.type.tensor_type
            dtype = TensorProto.DataType.Value(_TYPES[found[value.name].dtype])
            dims = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
            assert (dtype, dims) == (tensor.elem_type, found[value.name].dims), value.name
    assert ours.ops == {(node.domain, node.op_type) for node in theirs.node}


@pytest.mark.parametrize("name", EMBEDDED)
def test_bare_nodes_are_the_graph_without_functions(name: str) -> None:
    data = (resolve(name) / "graphs" / "tensorrt.onnx").read_bytes()
    whole, bare = ModelProto.FromString(data), ModelProto.FromString(onnxfile.bare(data))
    assert len(whole.functions) > 5 and not bare.functions
    del whole.functions[:]
    assert bare == whole
    assert any(node.domain == DEVICE_DOMAIN for node in bare.graph.node)
    assert onnxfile.bare(onnxfile.bare(data)) == onnxfile.bare(data)


def test_what_is_cut_anywhere_is_refused_or_has_no_more_than_it_says() -> None:
    data = (resolve("demo-draft") / "graphs" / "tensorrt.onnx").read_bytes()
    whole = onnxfile.read(data, "graph")
    for end in range(0, len(data), 997):
        try:
            found = onnxfile.read(data[:end], "graph")
        except BundleError as problem:
            assert problem.file == "graph"
        else:
            assert found == whole, "the graph is there, functions behind it are cut"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x3a\x00\x3a\x00",
        b"text",
        b"\x38\x01",
        b"\x3a\x00\x42\x00",
        b"\x3a\x02\x0a\x00\x42\x00",
    ],
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(BundleError, match="is no graph that can be read"):
        onnxfile.read(data, "graph")
