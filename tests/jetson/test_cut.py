"""Single nodes cut out of the device graph behave as in the whole graph."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest

from edge.runtime.ort_session import session_options
from jetson.verify import cut
from tests.tensorrt.graphs import made

CASES = [("mamba1", "w8a8"), ("all", "fp32")]


@cache
def last_run(name: str, quant: str) -> tuple[onnx.ModelProto, dict[str, cut.Array]]:
    found = made(name, quant)
    graph = cut.read(found.device.SerializeToString())
    values = cut.Values(graph, found.plan, found.folder, found.config.vocab_size)
    return graph, values.last()


def run(name: str, quant: str, model: bytes, feeds: dict[str, cut.Array]) -> dict[str, cut.Array]:
    options = session_options(1)
    options.add_session_config_entry(cut.FOLDER, str(made(name, quant).folder))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_node_alone_yields_what_it_does_in_the_graph(case: tuple[str, str]) -> None:
    graph, values = last_run(*case)
    nodes = cut.first_of_each_op(graph)
    assert {"all": "RotaryAttention", "mamba1": "SelectiveScanInt8"}[case[0]] in " ".join(nodes)
    for op, node in nodes.items():
        model = cut.alone(graph, node, values)
        feeds = {name: values[name] for name in cut.inputs_of(graph, node)}
        assert all(np.isfinite(array.astype(np.float64)).all() for array in feeds.values()), op
        found = run(*case, model, feeds)
        assert list(found) == list(node.output)
        # floating-point sums may have a different order
        assert all(one.right and one.worst < 1e-5 for one in cut.compare(found, values)), op


def test_a_cut_node_is_a_model_whose_plugin_has_the_kernels() -> None:
    graph, values = last_run(*CASES[0])
    for node in cut.first_of_each_op(graph).values():
        model = onnx.ModelProto.FromString(cut.alone(graph, node, values))
        (only,) = model.graph.node
        carries = [one.i for one in only.attribute if one.name == "carries"]
        assert carries == [1]
        assert only.op_type == node.op_type and len(model.functions) == len(graph.functions)


def test_the_run_that_is_looked_at_has_a_state_and_replays() -> None:
    _, values = last_run(*CASES[0])
    assert values["run"].tolist()[0] == cut.COUNTS[1], "nothing is pending"
    states = [name for name in values if name.endswith("ssm_state")]
    assert states and all(values[name].any() for name in states)


@pytest.mark.parametrize(
    ("dtype", "change", "right"),
    [
        (np.float32, 5e-4, True),
        (np.float32, 2e-3, False),
        (np.float32, np.nan, False),
        (np.int8, 1, True),
        (np.int8, 2, False),
        (np.int32, 1, False),
    ],
)
def test_what_counts_as_the_same(dtype: type, change: float, right: bool) -> None:
    wanted = np.arange(-50, 50).astype(dtype)
    found = wanted.copy()
    found[3] = found[3] + change * (50 if dtype == np.float32 else 1)
    (difference,) = cut.compare({"y": found}, {"y": wanted})
    assert difference.right is right


def test_many_integers_that_are_one_off_are_wrong() -> None:
    wanted = np.zeros(100, np.int8)
    assert not cut.compare({"y": wanted + np.int8(1)}, {"y": wanted})[0].right
