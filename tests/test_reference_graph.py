"""Graphs run by the reference ops: against the torch network and against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from edge.errors import ExportError
from edge.export.checkpoint import open_checkpoint
from edge.export.graph import GRAPH_FILE, WEIGHT_FILE, build_graph
from edge.export.graph.run import (
    GraphRunner,
    GraphSession,
    GraphState,
    open_reference,
    open_session,
    session_options,
)
from edge.export.network import Network
from edge.export.training_ops import selective_scan_heads_chunked
from edge.plugins.catalogue import OPS
from edge.plugins.reference.graph import ReferenceGraph, by_name
from edge.plugins.selective_scan_heads.reference import selective_scan_heads_node
from tests.facts import facts
from tests.state_spaces_checkpoints import save_mambabyte
from tests.test_graph_models import MODELS, network, tokens_of
from tests.transformers_checkpoints import save_bamba, save_mamba, save_mamba2


def build(name: str, folder: Path, quant: str = "fp32") -> Network:
    net = network(name)
    build_graph(net.config, net.canonical_tensors(), folder, quant)
    return net


def in_runs(
    session: GraphSession, net: Network, tokens: Any, runs: Sequence[int]
) -> tuple[Any, list[GraphState]]:
    """Return logits of tokens [B, T] and the state after every token, by runs of these lengths."""
    runner = GraphRunner(session, net.config)
    state = runner.initial(tokens.shape[0], sum(runs), fill=np.nan)
    pieces, states, start = [], [], 0
    for steps in runs:
        part = tokens[:, start : start + steps]
        logits, after = runner.run(part, state, kept=range(steps))
        pieces.append(logits)
        states += after
        start, state = start + steps, after[-1]
    return np.concatenate(pieces, 1), states


def close(found: Any, expected: Any, tolerance: float) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    worst = float(np.abs(found - expected).max(initial=0))
    assert worst <= tolerance * float(np.abs(expected).max(initial=1e-9))


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_runs_as_the_network_and_as_onnx_runtime(name: str, tmp_path: Path) -> None:
    net = build(name, tmp_path)
    batch = 1 if net.config.has_attention else 3
    tokens = tokens_of(batch, 21)
    with torch.no_grad():
        expected, end = net(torch.from_numpy(tokens))
    found, states = in_runs(open_reference(tmp_path), net, tokens, (13, 1, 5, 2))
    close(found, expected.numpy(), 1e-5)
    session = open_session(tmp_path, options=session_options(1))
    logits, theirs = in_runs(session, net, tokens, (13, 1, 5, 2))
    close(found, logits, 1e-5)
    for ours, other in zip(states, theirs, strict=True):
        assert ours.position == other.position and ours.arrays.keys() == other.arrays.keys()
        for key, array in ours.arrays.items():
            # KV cache slots after the last token are undefined.
            valid = slice(ours.position) if key.endswith("_cache") else slice(None)
            array, same = array[:, :, valid], other.arrays[key][:, :, valid]
            np.testing.assert_allclose(array, same, rtol=1e-4, atol=1e-5)
    for i, layer in enumerate(end.layers):
        for key, tensor in layer.items():
            array = states[-1].arrays[f"layers.{i}.{key}"]
            if key.endswith("_cache"):
                array = array[:, :, : tensor.shape[2], : tensor.shape[3]]
            elif key == "conv_state":
                array = array.swapaxes(0, 1)
            np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("save", [save_mamba, save_mamba2, save_bamba, save_mambabyte])
def test_a_checkpoint_of_every_family(save: Callable[[Path], Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path / "checkpoint"))
    net = Network(checkpoint.config).eval()
    net.load_canonical({name: tensor.float() for name, tensor in checkpoint.tensors()})
    build_graph(checkpoint.config, checkpoint, tmp_path)
    tokens = np.random.default_rng(0).integers(0, 200, (1, 19))
    with torch.no_grad():
        expected = net(torch.from_numpy(tokens))[0].numpy()
    found, _ = in_runs(open_reference(tmp_path), net, tokens, (11, 1, 7))
    close(found, expected, 1e-4)
    session = open_session(tmp_path, options=session_options(1))
    close(found, in_runs(session, net, tokens, (11, 1, 7))[0], 1e-4)


def test_every_op_has_its_reference() -> None:
    for op in OPS:
        by_name(op, {})


def test_function_bodies_are_not_looked_at(tmp_path: Path) -> None:
    net = build("all", tmp_path)
    model = onnx.load(tmp_path / GRAPH_FILE, load_external_data=False)
    del model.functions[:]
    tokens = tokens_of(1, 9)
    found, _ = in_runs(ReferenceGraph(model, tmp_path), net, tokens, (9,))
    np.testing.assert_array_equal(found, in_runs(open_reference(tmp_path), net, tokens, (9,))[0])


def test_another_scan_may_take_the_references_place(tmp_path: Path) -> None:
    net = build("mamba2 groups", tmp_path)
    tokens = tokens_of(2, 512)
    calls = 0

    def chunked(**given: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return selective_scan_heads_chunked(**given, chunk=32)

    ops = {"SelectiveScanHeads": partial(selective_scan_heads_node, scan=chunked)}
    graph = ReferenceGraph((tmp_path / GRAPH_FILE).read_bytes(), tmp_path, ops=ops)
    runner = GraphRunner(graph, net.config)
    found, _ = runner.run(tokens, runner.initial(2))
    assert calls == 2
    with torch.no_grad():
        close(found, net(torch.from_numpy(tokens))[0].numpy(), 1e-5)


def test_the_hook_sees_every_value_and_may_replace_it(tmp_path: Path) -> None:
    net = build("all", tmp_path)
    graph = open_reference(tmp_path)
    runner = GraphRunner(graph, net.config)
    tokens = tokens_of(1, 6)
    seen: dict[str, tuple[int, ...]] = {}

    def look(name: str, tensor: Tensor) -> None:
        assert name not in seen
        seen[name] = tuple(tensor.shape)

    graph.hook = look
    plain, _ = runner.run(tokens, runner.initial(1, 6))
    model = onnx.load(tmp_path / GRAPH_FILE, load_external_data=False)
    assert list(seen) == [name for node in model.graph.node for name in node.output]
    assert seen["layers.0.scan"] == (6, 1, 128) and seen["logits"] == (6, 1, 96)
    graph.hook = lambda name, tensor: tensor * 2 if name == "final" else None
    doubled, _ = runner.run(tokens, runner.initial(1, 6))
    np.testing.assert_array_equal(doubled, 2 * plain)


def test_only_what_is_asked_for_is_computed(tmp_path: Path) -> None:
    net = build("mamba1", tmp_path)
    graph = open_reference(tmp_path)
    runner = GraphRunner(graph, net.config)
    seen: list[str] = []
    graph.hook = lambda name, tensor: seen.append(name)
    feeds = runner.feeds(tokens_of(1, 5), runner.initial(1))
    (normed,) = graph.run(["layers.1.normed"], feeds)
    assert normed.shape == (5, 1, 64)
    assert seen[-2:] == ["layers.1.normed", "layers.1.residual"] and "layers.0.scan" in seen
    with pytest.raises(ExportError, match=facts("no node", "'layers.2.normed'")):
        graph.run(["layers.2.normed"], feeds)


def test_values_are_dropped_after_their_last_use(tmp_path: Path) -> None:
    """All but a few values of a long run are gone by the time the last layer runs."""
    import weakref

    net = build("mamba2", tmp_path)
    graph = open_reference(tmp_path)
    runner = GraphRunner(graph, net.config)
    alive: dict[str, weakref.ref[Tensor]] = {}
    left: list[str] = []

    def look(name: str, tensor: Tensor) -> None:
        if name == "logits":
            left.extend(n for n, ref in alive.items() if ref() is not None)
        alive[name] = weakref.ref(tensor)

    graph.hook = look
    runner.run(tokens_of(1, 40), runner.initial(1))
    assert "final" in left and "layers.1.ssm_states" in left
    assert not [n for n in left if n.split(".")[-1] in {"normed", "conv", "gated", "zxbcdt", "out"}]


def test_weights_are_read_from_the_mapped_file(tmp_path: Path) -> None:
    net = build("mlp", tmp_path)
    graph = open_reference(tmp_path)
    runner = GraphRunner(graph, net.config)
    feeds = runner.feeds(tokens_of(1, 3), runner.initial(1))
    before = graph.run(None, feeds)[0]
    assert np.abs(before).max() > 0
    # Unwritten pages follow the file.
    (tmp_path / WEIGHT_FILE).open("r+b").write(bytes((tmp_path / WEIGHT_FILE).stat().st_size))
    assert np.abs(graph.run(None, feeds)[0]).max() == 0


def test_trees_are_refused(tmp_path: Path) -> None:
    for name in ("mamba1", "mamba2", "attention"):
        net = build(name, tmp_path)
        runner = GraphRunner(open_reference(tmp_path), net.config)
        tokens = tokens_of(1, 4)
        with pytest.raises(ExportError, match="chains only"):
            runner.run(tokens, runner.initial(1, 4), parents=[-1, 0, 0, 1])


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    net = build("mlp", tmp_path)
    model = onnx.load(tmp_path / GRAPH_FILE, load_external_data=False)
    runner = GraphRunner(ReferenceGraph(model, tmp_path), net.config)
    feeds = runner.feeds(tokens_of(1, 3), runner.initial(1))
    with pytest.raises(ExportError, match="input 'rows' was not given"):
        runner.session.run(["logits"], {"tokens": feeds["tokens"]})
    (tmp_path / WEIGHT_FILE).write_bytes(b"\0" * 64)
    with pytest.raises(ExportError, match=rf"{WEIGHT_FILE}: ends before"):
        ReferenceGraph(model, tmp_path).run(None, feeds)
    (tmp_path / WEIGHT_FILE).unlink()
    with pytest.raises(ExportError, match=rf"{WEIGHT_FILE}: cannot be read"):
        ReferenceGraph(model, tmp_path).run(None, feeds)
    model.graph.node[-1].op_type = "LinearSomehow"
    with pytest.raises(ExportError, match="no reference runs edge::LinearSomehow"):
        ReferenceGraph(model, tmp_path).run(None, feeds)
