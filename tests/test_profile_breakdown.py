"""The time breakdown: events of ONNX Runtime's profiler, assigned to layers by the optimized graph;
on `cpu` calls of kernels, assigned by the launch plan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edge.apps.measure import cpu_profile
from edge.apps.measure.ort_profile import (
    GraphNode,
    NodePlace,
    breakdown,
    node_places,
    read_events,
    read_nodes,
    summarise,
)
from edge.apps.measure.run_cost import DECODE, PREFILL, RunKind, ranked
from edge.bundle import open_bundle
from edge.errors import EngineError
from edge.plugins.cpu import library
from edge.runtime import ort_session
from edge.runtime.ort import OrtEngine
from tests.session_models import bundle, model


def event(name: str, ts: int, dur: int, op: str = "") -> dict[str, Any]:
    return {"name": name, "cat": "Node", "ts": ts, "dur": dur, "args": {"op_name": op}}


RUN = [
    event("model_run", 1000, 500),
    event("s_kernel_time", 1010, 400, "Scan"),
    event("a_kernel_time", 1020, 100, "Add"),
    event("b_kernel_time", 1130, 50, "Add"),
    event("m_kernel_time", 1420, 60, "MatMul"),
]


def test_profile_charges_a_body_to_its_own_operators() -> None:
    warm_up = [event("model_run", 0, 900), event("s_kernel_time", 1, 800, "Scan")]
    cost = summarise("step", warm_up + RUN, 1)
    assert cost.ops == {"Scan": (0.25, 1), "Add": (0.15, 2), "MatMul": (0.06, 1)}
    assert cost.total == 0.5 and cost.between == pytest.approx(0.04)
    assert cost.parts == cost.layers == {}


def test_profile_charges_a_body_to_its_owners_layer() -> None:
    where = [
        NodePlace("Scan", "SelectiveScan", "layer 10"),
        NodePlace("MatMul", "Linear", "layer 9"),
    ]
    cost = summarise("step", RUN, 1, where)
    assert cost.parts == {"SelectiveScan": 0.4, "Linear": 0.06}
    assert list(cost.layers.items()) == [("layer 9", 0.06), ("layer 10", 0.4)]


def test_quickest_run_is_taken() -> None:
    slow = [event("model_run", 2000, 900), event("m_kernel_time", 2001, 800, "MatMul")]
    assert summarise("step", RUN + slow, 2).total == 0.5


def test_graph_that_did_not_run_tells_nothing() -> None:
    cost = summarise("step", RUN, 1, [NodePlace("Scan", "SelectiveScan", "layer 0")])
    assert cost.ops and cost.parts == cost.layers == {}


def test_nodes_inside_a_function_are_of_the_layer_they_read() -> None:
    nodes = [
        GraphNode("Range", ("tokens",), ("run.index",)),
        GraphNode("Gather", ("embedding.weight", "tokens"), ("embedded",)),
        GraphNode("MatMul", ("embedded", "_inlfunc_Linear_columns"), ("layers.0.xz",)),
        GraphNode("Exp", ("layers.0.xz",), ("_inlfunc_SelectiveScanHeads_1_token_4_u",)),
        GraphNode("Mul", ("_inlfunc_SelectiveScanHeads_1_token_4_u", "run.index"), ("anon",)),
        GraphNode("Add", ("anon", "embedded"), ("layers.1.residual",)),
        GraphNode("Mul", ("layers.1.residual", "norm_f.weight"), ("_inlfunc_RMSNorm_y",)),
        GraphNode("MatMul", ("_inlfunc_RMSNorm_y", "embedding.weight"), ("logits",)),
        GraphNode("Sub", ("run.index",), ("taps",)),
    ]
    found = node_places(nodes)
    assert [place.layer for place in found] == [
        "once", "embedding", "layer 0", "layer 0", "layer 0", "layer 1", "head", "head", "once",
    ]  # fmt: skip
    assert [place.part for place in found][2:5] == [
        "Linear", "SelectiveScanHeads", "SelectiveScanHeads"]  # fmt: skip


def test_graphs_are_read_as_onnx_reads_them(tmp_path: Path) -> None:
    """A real optimized graph; its events come in the order of its nodes, and no weights lie beside
    it.
    """
    with open_bundle(bundle("hybrid")) as opened:
        engine = OrtEngine.from_bundle(opened, threads=1, profile=tmp_path)
    state = engine.new_state()
    engine.run(np.array([[5, 6, 7]]), state, commit=True)
    written = engine.end_profile()
    events = read_events(written)
    whole = [e for e in json.loads(written.read_text()) if e["name"].endswith("_kernel_time")]
    assert summarise("run", [*whole, *(e for e in events if e["cat"] == "Session")], 1) == (
        summarise("run", events, 1)
    )
    path = tmp_path / ort_session.OPTIMIZED_GRAPH
    found = read_nodes(path.read_bytes())
    wanted = onnx.load(path, load_external_data=False).graph.node
    assert found == [GraphNode(n.op_type, tuple(n.input), tuple(n.output)) for n in wanted]
    cost = summarise("run", events, 1, node_places(found))
    assert cost.layers
    size = sum(file.stat().st_size for file in tmp_path.iterdir() if file.is_file())
    assert size < 2_000_000 and not (tmp_path / "weights").is_file()


@pytest.mark.parametrize("engine", ["ort", "cpu"])
@pytest.mark.parametrize("kind", ["base", "chat", "hybrid", "bytes"])
def test_every_layer_and_op_has_its_share(kind: str, engine: str) -> None:
    if engine == "cpu" and library.path() is None:
        pytest.skip("needs the kernels for CPUs")
    kinds = {"decode": DECODE, "prefill": PREFILL, "run": RunKind(4, 2)}
    profiled = {"ort": breakdown, "cpu": cpu_profile.breakdown}[engine]
    found = profiled(bundle(kind), 1, kinds)
    layers = model(kind).config.layers
    wanted = {f"layer {index}" for index in range(len(layers))} | {"embedding", "head"}
    for name, cost in found.items():
        assert wanted <= cost.layers.keys() <= wanted | {"once"}, name
        assert sum(cost.layers.values()) == pytest.approx(sum(cost.parts.values()))
        assert sum(cost.layers.values()) <= cost.total
        assert any(part.startswith(("SelectiveScan", "scan")) for part in cost.parts)
        assert {"Linear", "linear"} & cost.parts.keys()
    assert found["prefill"].title == "fp32 prefill, one run of 16"  # the bundle's chunk


def test_profiling_leaves_the_results_alone(tmp_path: Path) -> None:
    tokens = np.array([[5, 6, 7, 8]])
    with open_bundle(bundle("chat")) as opened:
        plain = OrtEngine.from_bundle(opened, threads=1)
        profiled = OrtEngine.from_bundle(opened, threads=1, profile=tmp_path)
    logits = [engine.run(tokens, engine.new_state(), rows="all") for engine in (plain, profiled)]
    profiled.end_profile()
    assert np.allclose(*logits, atol=1e-5)


@pytest.mark.parametrize("text", ["[\n]\n", '[\n{"name"', '[\n{"name": "model_run"}\n]', "{}"])
def test_profile_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(EngineError, match=r"profile\.json: the profile (cannot|holds no)"):
        read_events(tmp_path / "profile.json")


def test_the_rest_is_one_row() -> None:
    assert ranked({"a": 1.0, "b": 3.0, "c": 2.0, "d": 0.5}, 2) == [
        ("b", 3.0), ("c", 2.0), ("others", 1.5)]  # fmt: skip
    assert ranked({"a": 1.0}, 2) == [("a", 1.0)]
