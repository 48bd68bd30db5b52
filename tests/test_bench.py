"""The bench on a tiny shape: every peer's whole path, what counts as wrong, and the report.

Nothing here asserts a time.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from edge.apps.bench import goals, peers, run, weights
from edge.apps.bench.__main__ import app
from edge.apps.bench.folder import ModelFolder
from edge.apps.bench.models import SHAPES
from edge.apps.bench.peers import Rounding, Tokens, TransformersPeer
from edge.apps.measure import roofline
from edge.apps.measure.agreement import Agreement, Logits, agreement
from edge.apps.measure.roofline import Roof
from edge.apps.measure.table import FigureTable, show
from edge.errors import InputError
from edge.tensors import parameters

TINY = SHAPES["tiny"]
Facts = dict[str, Any]
HAS_LLAMA = all(importlib.util.find_spec(name) for name in ("llama_cpp", "gguf"))
needs_llama = pytest.mark.skipif(not HAS_LLAMA, reason=peers.INSTALL_LLAMA)
NAMES = ["edge-w8-cpu", "edge-w8", "edge-fp32", "transformers"]
LLAMA = ["llama-f16", "llama-q8_0", "llama-q4_0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[run.Reference]:
    """Return transformers' results for the tiny shape, made once and shared by all runs."""
    make = run.make_reference
    made = make(ModelFolder("tiny", folder), 1, lambda text: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run, "make_reference", lambda w, *rest: made if w.name == "tiny" else make(w, *rest)
        )
        yield made


@pytest.fixture(scope="module")
def measured(folder: Path, reference: run.Reference) -> Facts:
    return _measured("tiny", folder)


def _measured(shape: str, folder: Path) -> Facts:
    names = NAMES + (LLAMA if HAS_LLAMA else [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "BUDGET", 0.01)
        patch.setattr(roofline, "buffer_size", lambda: 1 << 20)  # else 8 caches: a GB and seconds
        return run.run(shape, names, folder, threads=1, rounds=1, profiled=True)


def test_every_peer_is_right_and_timed(measured: Facts) -> None:
    found = measured["peers"]
    assert all(peer["right"] for peer in found.values()), found
    assert run.right(measured)
    assert found.keys() >= set(NAMES) and all("decode" in peer for peer in found.values())


def test_every_peer_is_right_on_mamba2(folder: Path) -> None:
    found = _measured("tiny-mamba2", folder)["peers"]
    assert found.keys() >= set(NAMES) and all(peer["right"] for peer in found.values()), found


def test_report_says_what_was_measured_where(measured: Facts) -> None:
    found: Facts = json.loads(json.dumps(measured))
    assert found["machine"]["cpu"] and found["versions"]["onnxruntime"] and found["date"]
    ours = found["peers"]["edge-w8-cpu"]
    assert ours["right"] and ours["agreement"].keys() == {"prompt", "run", "steps", "prefill"}
    assert ours["decode"]["rounds_ms"] and ours["prefill"]["median_ms"] > 0
    assert found["costs"].keys() == {f"edge-w8-cpu {figure}" for figure in run.FIGURES}
    assert all(
        any("linear" in kernel for kernel in cost["ops"]) for cost in found["costs"].values()
    )
    console = Console(file=io.StringIO(), width=80)
    show(run.parts(found), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "run ≤ 1.15 × a step" in text and "decode ≤ 1.15 × reading its bytes" in text
    assert "…" not in text  # nothing is cut off in 80 columns


class Forgetful:
    """transformers, but it loses a convolution state before the short run."""

    name, version, note, weight_bytes = "forgetful", "", "", 0
    rounding: Rounding = "w8"

    def __init__(self, workspace: ModelFolder) -> None:
        self._inner = TransformersPeer(workspace, 1)
        self._prompt: Tokens = np.zeros(0, np.int64)

    def prefill(self, tokens: Tokens, *, every_row: bool = False) -> Logits:
        self._prompt = tokens
        return self._inner.prefill(tokens, every_row=every_row)

    def run(self, tokens: Tokens) -> Logits:
        self._inner.prefill(self._prompt[:-2])  # two tokens short
        return self._inner.run(tokens)

    def step(self, token: int) -> Logits:
        return self._inner.step(token)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("shape", ["tiny", "tiny-mamba2"])
def test_stale_state_is_wrong(shape: str, folder: Path, reference: run.Reference) -> None:
    workspace = ModelFolder(shape, folder)
    parts = run.compare(Forgetful(workspace), run.make_reference(workspace, 1, lambda text: None))
    assert parts["prompt"].kl_nats <= run.KL_LIMITS["w8"] < parts["run"].kl_nats


def test_logits_that_are_not_numbers_never_agree() -> None:
    logits = np.zeros((2, 3), np.float32)
    broken = logits.copy()
    broken[1, 1] = np.nan
    assert agreement(logits, broken).kl_nats == np.inf
    assert agreement(logits, logits) == Agreement(1.0, 0.0, 0.0)


def test_wrong_result_of_ours_gets_no_figures_and_exit_code_1(
    folder: Path, reference: run.Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run.KL_LIMITS, "w8", 0.0)  # no quantized model is that close
    arguments = ["--shape", "tiny", "--rounds", "1", "--peers", "edge-w8", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--keep", str(folder)])
    assert result.exit_code == 1
    ours = json.loads(result.stdout)["peers"]["edge-w8"]
    assert not ours["right"] and "decode" not in ours


def test_absent_peer_is_named_with_how_to_install_it(
    folder: Path, reference: run.Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = peers.installed
    monkeypatch.setattr(peers, "installed", lambda name: "llama" not in name and present(name))
    found = run.run("tiny", ["llama-q8_0"], folder, threads=1, rounds=1)
    assert "needs llama-cpp-python" in found["absent"]["llama-q8_0"]
    assert ".venv/bin/pip install llama-cpp-python gguf" in found["absent"]["llama-q8_0"]
    assert run.right(found) and not found["peers"]


def test_a_peer_on_the_gpu_needs_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.install, "driver_version", lambda: None)
    assert "an NVIDIA driver" in peers.missing("edge-w4-cuda")
    assert "an NVIDIA driver" in peers.missing("llama-q4_0-cuda")
    assert "an NVIDIA driver" not in peers.missing("edge-w4-cpu")


def test_our_peer_on_the_gpu_is_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_DEVICE", "interpret")
    logits = []
    for name in ("edge-w8a8-cuda", "edge-w8a8"):
        assert not peers.missing(name)
        peer = peers.PEERS[name].make(ModelFolder("tiny", folder), 1)
        assert peer.name == name
        assert ("interpreter" in peer.note) == name.endswith("-cuda")
        prompt = peer.prefill(np.arange(5), every_row=True).copy()
        logits.append(np.concatenate([prompt, peer.run(np.arange(3)).copy(), peer.step(2)]))
        peer.close()
    assert agreement(*reversed(logits)).kl_nats < run.KL_LIMITS["w8a8"]


def test_the_first_of_ours_that_is_timed_is_the_measure(measured: Facts) -> None:
    ours = measured["peers"]["edge-w8"]
    for names, expected in (
        (("edge-w8a8-cuda", "llama-q8_0-cuda"), ["time ÷ that of edge-w8a8-cuda"]),
        (("edge-w8a8-cuda", "edge-w8a8-cpu"), ["time ÷ that of edge-w8a8-cpu"]),
        (("edge-w8", "transformers"), []),
    ):
        parts = run.parts(measured | {"peers": dict.fromkeys(names, ours)})
        titles = [part.title or "" for part in parts if isinstance(part, FigureTable)]
        assert [title for title in titles if title.startswith("time")] == expected


def test_models_are_not_written_for_peers_that_lack_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = peers.installed
    monkeypatch.setattr(peers.install, "driver_version", lambda: None)
    monkeypatch.setattr(peers, "installed", lambda name: "llama" not in name and present(name))
    with pytest.raises(InputError, match="llama-q8_0-cuda needs llama-cpp-python") as refused:
        run.write_models("tiny", ["edge-w8-cuda", "llama-q8_0-cuda"], tmp_path)
    assert refused.value.remedy == peers.INSTALL_LLAMA_CUDA and not [*tmp_path.iterdir()]


def test_models_are_written_once(tmp_path: Path) -> None:
    arguments = ["--prepare", "--shape", "tiny", "--peers", "edge-w8-cuda,edge-w8,transformers"]
    assert CliRunner().invoke(app, arguments).exit_code != 0  # without a folder
    files = []
    for _ in range(2):
        assert CliRunner().invoke(app, [*arguments, "--keep", str(tmp_path)]).exit_code == 0
        (bundle,) = tmp_path.iterdir()
        files.append((bundle.name, (bundle / "manifest.json").stat().st_mtime_ns))
    assert files[0] == files[1]


def test_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"unknown peer 'vllm'.*edge-w8"):
        peers.missing("vllm")


def test_weights_are_the_same_every_time() -> None:
    first, second = weights.mamba_tensors(TINY), weights.mamba_tensors(TINY)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert sum(tensor.size for tensor in first.values()) == parameters(TINY)
    assert not np.array_equal(first["layers.0.D"], first["layers.1.D"])


@needs_llama
def test_gguf_holds_the_same_weights(folder: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    workspace = ModelFolder("tiny", folder)
    tensors = weights.mamba_tensors(TINY)
    stored = {tensor.name: tensor for tensor in GGUFReader(workspace.gguf("q8_0")).tensors}
    assert stored.keys() == {weights.gguf_name(name) for name in tensors}
    mixer = "layers.1."
    decay = stored["blk.1.ssm_a"].data
    assert np.array_equal(decay, -np.exp(tensors[f"{mixer}A_log"]))
    plain = {tensor.name: tensor.data for tensor in GGUFReader(workspace.gguf("f16")).tensors}
    matrix = tensors[f"{mixer}in_proj.weight"]
    assert np.array_equal(plain["blk.1.ssm_in.weight"], matrix.astype(np.float16))
    packed = stored["blk.1.ssm_in.weight"]
    assert packed.tensor_type.name == "Q8_0"
    assert np.abs(dequantize(packed.data, packed.tensor_type) - matrix).max() < 0.01


def test_ratio_is_taken_within_rounds() -> None:
    ours, theirs = {"rounds_ms": (10.0, 200.0, 30.0)}, {"rounds_ms": (5.0, 100.0, 10.0)}
    assert run.over(ours, theirs) == 2.0


def test_limit_of_memory_is_taken_within_rounds() -> None:
    fast, slow = (Roof(speed, speed, 1 << 20, None) for speed in (4e9, 1e9))
    limit = goals.limit_ms(TINY, 1 << 20, fast)
    step = {"rounds_ms": (1.1 * limit, 4.4 * limit, 1.1 * limit)}
    ours = {"decode": step, "run": step, "weight_bytes": 1 << 20}
    found = goals.check_goals({"edge-w8a8-cpu": ours}, TINY, [fast, slow, fast])
    values = {row["expected"]: row["value"] for row in found}
    assert values["edge-w8a8-cpu decode ≤ 1.15 × reading its bytes"] == pytest.approx(1.1)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A peer sets torch's thread count for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
