"""Calibration over fp32 graphs: the observations, for any order and grouping of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from edge.errors import ExportError
from edge.export.calibration.calibrate import calibrate, calibration_graph, hessians
from edge.export.calibration.hessians import HessianSource
from edge.export.calibration.texts import CalibrationText
from edge.export.graph import GRAPH_FILE, build_graph
from edge.export.graph.run import GraphRunner, open_reference
from edge.export.network import Network
from edge.export.quantize.observers import Statistics, scale_of
from edge.export.recipes import plan_model, recipe
from edge.plugins.hadamard.matrices import rotate
from tests.facts import facts
from tests.test_graph_models import V, network

SITES = {
    "mamba1": ("normed", "xz", "conv", "dbc", "dt", "scan", "ssm_states"),
    "mamba2": ("normed", "z", "xBC", "conv", "x", "B", "C", "dt", "gated", "ssm_states"),
    "attention": ("normed", "attended_time"),
    "mlp": ("normed", "gated"),
}


def build(name: str, folder: Path) -> Network:
    net = network(name)
    build_graph(net.config, net.canonical_tensors(), folder)
    return net


def text_of(count: int, length: int, seed: int = 0) -> CalibrationText:
    tokens = np.random.default_rng(seed).integers(0, V, (count, length))
    return CalibrationText(tokens, count, "text.txt", "0" * 64)


def sites(net: Network, states: bool = True) -> list[str]:
    """Return every value of a model that some recipe rounds."""
    return ["final"] + [
        f"layers.{i}.{site}"
        for i, layer in enumerate(net.config.layers)
        for site in SITES[layer.kind]
        if (states or site != "ssm_states") and not (site == "gated" and getattr(layer, "d_mlp", 0))
    ]


def same(one: Statistics, two: Statistics) -> bool:
    """Return whether two made the same observations, to the last bit, and so would give the same
    scales.
    """
    return (
        np.array_equal(one.counts, two.counts)
        and np.array_equal(one.channel_absmax, two.channel_absmax)
        and one.octav() == two.octav()
        and scale_of(one.percentile(99.9)) == scale_of(two.percentile(99.9))
    )


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("name", ["mamba1 odd", "mamba2 groups", "all"])
def test_everything_asked_for_is_seen_over_every_token(
    name: str, states: bool, tmp_path: Path
) -> None:
    net = build(name, tmp_path)
    text, wanted = text_of(2, 70), sites(net, states)
    found = calibrate(calibration_graph(tmp_path), net.config, text, wanted)
    graph = open_reference(tmp_path)
    runner = GraphRunner(graph, net.config)
    for value in wanted:
        parts = []
        for row in text.sequences:
            feeds = runner.feeds(row[None], runner.initial(1, 70), kept=range(70))
            parts.append(graph.run([value], feeds)[0])
        x = np.abs(np.stack(parts))
        statistics = found.statistics(value)
        assert statistics.count == x.size
        axes = (-1,)
        if value.endswith("ssm_states"):
            axes = (-2,) if net.config.layers[int(value[7])].kind == "mamba1" else (-3, -1)
        others = tuple(i for i in range(x.ndim) if i - x.ndim not in axes)
        np.testing.assert_allclose(statistics.channel_absmax, x.max(others), rtol=2e-4, atol=2e-6)
    assert "logits" not in found.values


def test_order_and_grouping_of_sequences_leave_no_trace(tmp_path: Path) -> None:
    net = build("all", tmp_path)
    graph, wanted = calibration_graph(tmp_path), sites(net)
    text, turned = text_of(6, 40), ["layers.0.scan", "layers.2.gated"]

    def run(rows: Any) -> Any:
        part = CalibrationText(text.sequences[rows], 6, text.file, text.sha256)
        return calibrate(graph, net.config, part, wanted, turned)

    whole, shuffled = run(slice(None)), run([4, 1, 5, 0, 3, 2])
    groups = [run([3, 0]), run([5]), run([1, 2, 4])]
    for value in wanted:
        assert same(whole.statistics(value), shuffled.statistics(value))
    for value in turned:
        assert same(whole.statistics(value, True), shuffled.statistics(value, True))
    for group in groups[1:]:
        for value in wanted:
            groups[0].statistics(value).merge(group.statistics(value))
        for value in turned:
            groups[0].statistics(value, True).merge(group.statistics(value, True))
    for value in wanted:
        assert same(whole.statistics(value), groups[0].statistics(value))
    for value in turned:
        assert same(whole.statistics(value, True), groups[0].statistics(value, True))


def test_a_rotation_is_seen_beside_the_value(tmp_path: Path) -> None:
    net = build("mamba1", tmp_path)
    text = text_of(1, 20)
    found = calibrate(
        calibration_graph(tmp_path), net.config, text, ["layers.1.scan"], ["layers.1.scan"]
    )
    graph = open_reference(tmp_path)
    runner = GraphRunner(graph, net.config)
    feeds = runner.feeds(text.sequences, runner.initial(1))
    scan = graph.run(["layers.1.scan"], feeds)[0]
    plain, turned = (found.statistics("layers.1.scan", rotated) for rotated in (False, True))
    np.testing.assert_allclose(plain.channel_absmax, np.abs(scan).max((0, 1)), rtol=1e-5)
    expected = np.abs(rotate(scan)).max((0, 1))
    np.testing.assert_allclose(turned.channel_absmax, expected, rtol=1e-4, atol=1e-6)
    assert not np.allclose(plain.channel_absmax, turned.channel_absmax, rtol=0.1)


def test_only_what_is_needed_is_run_and_progress_is_told(tmp_path: Path) -> None:
    net = build("mamba1", tmp_path)
    graph, told = calibration_graph(tmp_path), []
    found = calibrate(
        graph, net.config, text_of(3, 8), ["layers.0.conv"],
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == [(1, 3), (2, 3), (3, 3)] and graph.hook is None
    assert list(found.values) == ["layers.0.conv"]
    assert found.text == {
        "text": "text.txt", "sha256": "0" * 64, "sequences": 3, "sequences_asked": 3, "length": 8,
    }  # fmt: skip
    with pytest.raises(KeyError):
        found.statistics("layers.0.conv", rotated=True)
    with pytest.raises(ExportError, match=facts("no node", "'layers.9.conv'")):
        calibrate(graph, net.config, text_of(1, 8), ["layers.9.conv"])


def test_the_number_of_cores_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = build("all", tmp_path)
    graph, wanted = calibration_graph(tmp_path), sites(net)
    found = []
    for cores, threads in ((1, 1), (3, 2)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        torch.set_num_threads(threads)
        found.append(calibrate(graph, net.config, text_of(5, 24), wanted))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    assert all(same(found[0].statistics(name), found[1].statistics(name)) for name in wanted)


def broken(name: str, tensor: str, value: float, folder: Path) -> Network:
    net = network(name)
    with torch.no_grad():
        net.canonical_tensors()[tensor].fill_(value)
    build_graph(net.config, net.canonical_tensors(), folder)
    return net


def test_the_layer_where_values_overflow_is_named(tmp_path: Path) -> None:
    # 3e38 times anything overflows: in layer 1, whose product is not observed.
    net = broken("mamba1", "layers.1.out_proj.weight", 3e38, tmp_path)
    graph = calibration_graph(tmp_path)
    with pytest.raises(ExportError, match=r"layers\.1\.out: .*NaN or infinite"):
        calibrate(graph, net.config, text_of(1, 8), ["layers.0.conv", "final"])
    assert graph.hook is None
    # Layers before it are unaffected.
    calibrate(graph, net.config, text_of(1, 8), ["layers.1.conv"])


def test_a_value_that_is_always_zero_has_a_range_of_zero(tmp_path: Path) -> None:
    net = broken("mamba1", "layers.0.D", 0.0, tmp_path)
    with torch.no_grad():
        net.canonical_tensors()["layers.0.x_proj.weight"].zero_()
    build_graph(net.config, net.canonical_tensors(), tmp_path)
    found = calibrate(
        calibration_graph(tmp_path), net.config, text_of(2, 8), ["layers.0.scan", "layers.0.conv"]
    )
    silent, other = (found.statistics(f"layers.0.{name}") for name in ("scan", "conv"))
    assert silent.count == 16 * 128 and silent.absmax == 0 and other.absmax > 0
    assert scale_of(silent.absmax) == 1


def test_experts_are_rounded_by_what_each_of_them_reads(tmp_path: Path) -> None:
    net = build("experts", tmp_path)
    graph, text = calibration_graph(tmp_path), text_of(3, 12)
    source = HessianSource(tmp_path, net.config, text, plan_model(net.config, recipe("w4a16")))
    found = source("layers.0.down_proj.weight")
    runner, total = GraphRunner(graph, net.config), np.zeros((6, 32, 32))
    for row in text.sequences:
        feeds = runner.feeds(row[None], runner.initial(1))
        x, chosen = graph.run(["layers.0.gated", "layers.0.chosen"], feeds)
        for slot, expert in zip(x.reshape(-1, 32).astype(float), chosen.flatten(), strict=True):
            total[expert] += np.outer(slot, slot)
    assert found is not None
    np.testing.assert_allclose(found, total, rtol=1e-6, atol=1e-9)
    # 36 tokens and 2 experts each: none of the six has seen as many tokens as it has columns
    assert source.thin()["layers.0.down_proj"] == [0, 1, 2, 3, 4, 5]
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    plan = plan_model(net.config, recipe("w4a16"))
    build_graph(net.config, net.canonical_tensors(), rounded, plan, hessian=source)
    stored = onnx.load(rounded / GRAPH_FILE, load_external_data=False).graph.initializer
    dims = {tensor.name: tuple(tensor.dims) for tensor in stored}
    assert dims["layers.0.down_proj.weight.packed"] == (6, 64, 1, 16)


def test_hessians_are_those_of_all_tokens_in_any_order(tmp_path: Path) -> None:
    net = build("mamba1", tmp_path)
    graph, text = calibration_graph(tmp_path), text_of(3, 12)
    wanted, turned = ["layers.0.normed", "layers.1.conv"], ["layers.1.scan"]
    values, rotated = hessians(graph, net.config, text, wanted, turned)
    backwards = CalibrationText(text.sequences[::-1], 3, text.file, text.sha256)
    again, rotated_again = hessians(graph, net.config, backwards, wanted, turned)
    runner = GraphRunner(graph, net.config)
    for name in (*wanted, *turned):
        parts = [
            graph.run([name], runner.feeds(row[None], runner.initial(1)))[0][:, 0]
            for row in text.sequences
        ]
        x = np.concatenate(parts).astype(np.float64)
        x = rotate(x) if name in turned else x
        found, other = (
            (rotated[name], rotated_again[name]) if name in turned else (values[name], again[name])
        )
        assert found.rows == 36 and found.total is not None and other.total is not None
        np.testing.assert_allclose(found.total, x.T @ x, rtol=1e-4, atol=1e-4)
        assert found.total.tobytes() == other.total.tobytes()
