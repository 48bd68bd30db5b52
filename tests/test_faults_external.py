"""A graph that reaches outside its bundle is refused: for weights (row 8 of the fault table), or
for memory that no run of its model needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from edge.errors import EdgeError, EngineError
from edge.runtime.model import load
from tests.malformed import resigned
from tests.session_models import bundle

GRAPH = "graphs/ort.onnx"


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield initializers, and tensors in attributes, including nested graphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _escaping(folder: Path, location: str, nested: bool) -> None:
    """Move one tensor of the graph to `location`, with matching hashes."""
    model = onnx.load(folder / GRAPH, load_external_data=False)
    outside = [tensor for tensor in model.graph.initializer if tensor.external_data]
    tensor = outside[0]
    if nested:  # as the value of a node in an unused branch of an If
        moved = onnx.TensorProto()
        moved.CopyFrom(tensor)
        tensor = moved
        branch = onnx.helper.make_graph(
            [onnx.helper.make_node("Constant", [], ["inner"], value=moved)], "branch", [],
            [onnx.helper.make_tensor_value_info("inner", moved.data_type, None)],
        )  # fmt: skip
        tensor = branch.node[0].attribute[0].t
        _relocate(tensor, location)
        model.graph.initializer.append(
            onnx.helper.make_tensor("yes", onnx.TensorProto.BOOL, [], [True])
        )
        model.graph.node.insert(0, onnx.helper.make_node(
            "If", ["yes"], ["unused"], then_branch=branch, else_branch=branch))  # fmt: skip
    else:
        _relocate(tensor, location)
    (folder / GRAPH).write_bytes(model.SerializeToString())
    resigned(folder)


def _relocate(tensor: onnx.TensorProto, location: str) -> None:
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = location


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("how", ["above", "absolute", "dotted", "link", "proc", "tokenizer"])
def test_row_8_weights_outside_of_the_bundle(how: str, nested: bool, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle("chat"), folder)
    secret = tmp_path / "secret.bin"
    shutil.copyfile(folder / "weights.bin", secret)  # long enough to be read as the weights
    location = {
        "above": "../secret.bin",
        "absolute": str(secret),
        "dotted": "tokenizer/../../secret.bin",
        "link": "weights.lnk",
        "proc": f"/proc/self/root{secret}",
        "tokenizer": "README.md",
    }[how]
    if how == "link":
        os.symlink(secret, folder / "weights.lnk")
    _escaping(folder, location, nested)
    with pytest.raises(EdgeError):
        load(folder, engine="ort", threads=1).session().generate("one", max_tokens=1).finish()


@pytest.mark.parametrize("nested", [False, True])
def test_row_8_the_same_graph_with_its_own_weights_runs(nested: bool, tmp_path: Path) -> None:
    """The graphs above are refused for where they point, and for nothing else."""
    folder = tmp_path / "bundle"
    shutil.copytree(bundle("chat"), folder)
    _escaping(folder, "weights.bin", nested)
    load(folder, engine="ort", threads=1).session().generate("one", max_tokens=1).finish()


def test_a_run_that_takes_memory_without_end_is_stopped(tmp_path: Path) -> None:
    """A gigabyte of doublings, by ops that the exporter writes, without any stated size."""
    folder = tmp_path / "bundle"
    shutil.copytree(bundle("chat"), folder)
    model = onnx.load(folder / GRAPH, load_external_data=False)
    graph, logits = model.graph, model.graph.output[0].name
    for node in graph.node:
        node.output[:] = ["kept" if name == logits else name for name in node.output]
        node.input[:] = ["kept" if name == logits else name for name in node.input]
    make = onnx.helper.make_node
    tokens = next(one.name for one in graph.input if one.name == "tokens")
    graph.node.append(make("Identity", [tokens], ["grown0"]))
    for i in range(27):
        graph.node.append(make("Concat", [f"grown{i}"] * 2, [f"grown{i + 1}"], axis=0))
    graph.node.extend(
        [
            make("ReduceMax", ["grown27"], ["top"], keepdims=0),
            make("Cast", ["top"], ["much"], to=onnx.TensorProto.FLOAT),
            make("Add", ["kept", "much"], [logits]),
        ]
    )
    (folder / GRAPH).write_bytes(model.SerializeToString())
    resigned(folder)
    with load(folder, engine="ort", threads=1) as opened, opened.session() as session:
        for _ in range(2):
            with pytest.raises(EngineError, match="memory"):
                session.generate("Hello", max_tokens=1).finish()
        # the others are unchanged
        with load(bundle("chat"), engine="ort", threads=1) as good, good.session() as sound:
            assert sound.generate("Hello", max_tokens=2).finish().tokens
