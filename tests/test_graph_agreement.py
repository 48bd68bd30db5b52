"""The check that an engine matches the reference ops passes, and can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, numpy_helper

from edge.errors import ExportError
from edge.export.graph import GRAPH_FILE
from edge.export.graph.agreement import Track, rounded_values, verify_engine
from edge.export.graph.verify import compare, graph_logits
from tests.onnx_ops import all_nodes
from tests.quantized_models import built, in_runs, network, plan_of, runners, tokens_of
from tests.test_graph_models import MODELS


def engine_figures(name: str, folder: Path) -> dict[str, float]:
    found = verify_engine(network(name).config, folder, tokens_of(120))
    return {key: value for key, value in found.items() if isinstance(value, float)}


@pytest.mark.parametrize("quant", ["w8a8", "w8a8-dynamic", "w8a8-hadamard", "w4a8"])
@pytest.mark.parametrize("name", MODELS)
def test_engines_on_one_track_agree(name: str, quant: str, tmp_path: Path) -> None:
    built(name, plan_of(name, quant)[1], tmp_path)
    found = engine_figures(name, tmp_path)
    assert found["kl_nats_per_token"] <= 1e-4 and found["top1_agreement"] >= 0.99
    assert found["flips"] <= 1e-3


@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
def test_free_figures_are_those_of_a_reference_that_follows_nothing(
    name: str, tmp_path: Path
) -> None:
    """Whether a value flips, as with Mamba-2 on some processors, or none does."""
    built(name, plan_of(name, "w8a8")[1], tmp_path)
    found, tokens = engine_figures(name, tmp_path), tokens_of(120)
    engine, reference = runners(name, tmp_path)
    free, _ = in_runs(reference, tokens, (tokens.size,))
    expected = compare(free, graph_logits(engine, tokens))
    for figure in ("kl_nats_per_token", "top1_agreement"):
        near = pytest.approx(expected[figure], rel=0.06, abs=1e-12)
        assert found[f"free_{figure}"] == near


def test_every_int8_value_is_compared(tmp_path: Path) -> None:
    built("all", plan_of("all", "w8a8")[1], tmp_path)
    model = onnx.load(tmp_path / GRAPH_FILE, load_external_data=False)
    names = rounded_values(model)
    products = [n for n in model.graph.node if n.op_type.startswith("LinearInt8")]
    made = {name for node in model.graph.node for name in node.output if name in names}
    split = {
        out for n in model.graph.node if n.op_type == "Split" and n.input[0] in made
        for out in n.output
    }  # fmt: skip
    assert products and all(node.input[0] in made | split for node in products)


def shift_zero_point(model: ModelProto) -> None:
    """Every value that a convolution rounds is one step too large."""
    for function in model.functions:
        if function.name == "CausalConv1dInt8":
            for node in function.node:
                if node.op_type == "Constant" and node.attribute[0].t.data_type == 2:
                    node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(127, np.uint8)))


def forget_the_skip(model: ModelProto) -> None:
    """The scan's D·x is subtracted instead of added."""
    for function in model.functions:
        if function.name.startswith("SelectiveScan"):
            nodes = list(all_nodes(function.node))
            after_skip = {n.output[0] for n in nodes if "skip" in n.output[0]}
            for node in nodes:
                if node.op_type == "Add" and after_skip & set(node.input):
                    node.op_type = "Sub"


@pytest.mark.parametrize("spoil", [shift_zero_point, forget_the_skip])
@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
def test_a_wrong_function_body_is_refused(
    name: str, spoil: Callable[[ModelProto], None], tmp_path: Path
) -> None:
    built(name, plan_of(name, "w8a8")[1], tmp_path)
    model = onnx.load(tmp_path / GRAPH_FILE, load_external_data=False)
    before = model.SerializeToString()
    spoil(model)
    assert model.SerializeToString() != before
    (tmp_path / GRAPH_FILE).write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match=r"ONNX Runtime (rounds|differs)"):
        engine_figures(name, tmp_path)


def test_a_value_at_the_threshold_of_outliers_is_one_flip() -> None:
    """Its row then has other scales and numbers; a wrong number in another row is still found."""
    engine = {
        "y": np.array([[127, 3], [60, 127]], np.int8), "scale": np.array([[0.01], [0.1]]),
        "outliers": np.array([[0.0, 0.0], [0.0, 0.0]], np.float32),
    }  # fmt: skip
    ours = {"y": np.array([[0, 127], [60, 127]], np.int8), "scale": np.array([[0.02], [0.1]]),
            "outliers": np.array([[6.0, 0.0], [0.0, 0.0]], np.float32)}  # fmt: skip
    for wrong, worst in ((0, 0), (9, 9)):
        engine["y"][1, 0] = 60 - wrong
        track = Track(engine, {"outliers": ("y", "scale")})
        for name, array in ours.items():
            found = track(name, torch.from_numpy(array))
            assert found is not None and np.array_equal(found, engine[name])
        assert track.worst == (worst, "y") and track.flips == 1 + bool(wrong)


@pytest.mark.parametrize("by_row, flips", [(False, 5), (True, 2)])
def test_what_a_flip_inside_experts_does_to_a_row_is_one_flip(by_row: bool, flips: int) -> None:
    engine = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.int8)
    ours = engine + np.array([[1, -1, 1], [0, 0, 0], [1, 0, 1]], np.int8)
    track = Track({"y": engine}, by_row=by_row)
    track("y", torch.from_numpy(ours))
    assert (track.flips, track.values, track.worst) == (flips, 9, (1, "y"))


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_only_what_differs_is_followed(dtype: type[np.generic]) -> None:
    """Where nothing is, the free run is not made."""
    engine = np.array([[1, 2], [3, 4]], dtype)
    track = Track({"y": engine})
    assert track("y", torch.from_numpy(engine.copy())) is None and not track.left
    other = engine.copy()
    other[1, 1] += dtype(1)
    followed = track("y", torch.from_numpy(other))
    assert followed is not None and np.array_equal(followed, engine) and track.left


def test_a_model_whose_logits_are_all_zero_is_compared() -> None:
    none, some = np.zeros((1, 3, 5), np.float32), np.ones((1, 3, 5), np.float32)
    assert compare(none, none)["relative_difference"] == 0
    assert compare(none, some)["relative_difference"] == 1
