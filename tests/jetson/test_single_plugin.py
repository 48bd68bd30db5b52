"""Engines of one node: how they are built, as far as possible without a GPU, and the report.

That TensorRT builds and runs them on a board is unproven: jetson/verify.sh.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge.bundle import open_bundle
from edge.bundle.reader import WEIGHT_FILE
from edge.errors import EngineError
from edge.runtime.tensorrt import bindings
from edge.runtime.tensorrt.compile import Order
from edge.runtime.tensorrt.profiles import EngineSizes
from jetson.verify import cut, single_plugin

DEMO = Path(__file__).parents[2] / "apps" / "bundles" / "demo"


def test_tensorrt_for_rtx_builds_every_cut_node_by_the_same_road() -> None:
    # with three tokens, which the parser knows, it refuses shapes that do not fit
    try:
        trt = bindings.load("rtx")
    except EngineError as problem:
        pytest.skip(str(problem))
    order = Order(EngineSizes(), architectures=(86,))
    with open_bundle(DEMO) as bundle:
        graph, values = single_plugin.opened(bundle)
        for node in cut.first_of_each_op(graph).values():
            model = cut.alone(graph, node, values)
            engine = single_plugin.compiled(trt, model, bundle.fd(WEIGHT_FILE), order)
            assert len(engine) > 10_000


def test_every_op_of_the_demonstration_has_a_node_and_values() -> None:
    with open_bundle(DEMO) as bundle:
        graph, values = single_plugin.opened(bundle)
    nodes = cut.first_of_each_op(graph)
    assert len(nodes) > 10 and next(iter(nodes)).startswith("Embed")
    for node in nodes.values():
        assert {*cut.inputs_of(graph, node), *node.output} <= set(values)
        assert cut.alone(graph, node, values)


@pytest.mark.parametrize(
    ("code", "out", "errors", "wanted"),
    [
        (0, {"right": True, "build_s": 2.5, "outputs": [{"worst": 0.5}]}, "", "right  Op: built"),
        (1, {"right": False, "build_s": 2.5, "outputs": []}, "", "WRONG  Op: built in 2.5 s"),
        (-11, None, "log\nthe plugin failed\n", "WRONG  Op: exit code -11: the plugin failed"),
        (1, None, "", "WRONG  Op: exit code 1: no output"),
    ],
)
def test_what_each_process_found_is_told(
    code: int, out: dict[str, object] | None, errors: str, wanted: str
) -> None:
    text = "" if out is None else f"a warning\n{json.dumps(out)}\n"
    assert single_plugin.line("Op", code, text, errors).startswith(wanted)
