"""From a bundle to the tensorrt engine by its name, and a chat on it.

ONNX Runtime (`ort_tensorrt`) is imported as TensorRT for RTX, and the GPU is an interpreter. The
bundle, its device graph and the cache of engines are real.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.apps.evaluate import modes
from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.errors import EngineError, InputError
from edge.runtime.model import Model
from edge.runtime.tensorrt import bindings, cache, library, machine, opening
from edge.runtime.tensorrt.library import PluginLibrary
from edge.runtime.tensorrt.opening import TensorRTEngine
from edge.runtime.tensorrt.profiles import EngineSizes
from tests.facts import facts, says
from tests.same_talk import check_talk
from tests.session_models import bundle, model
from tests.tensorrt import ort_tensorrt
from tests.tensorrt.test_open_library import plugins as small_library

GREEDY = {"temperature": 0.0, "max_tokens": 3}
SIZES = EngineSizes(window=4, batch=2, chunk=16)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ort_tensorrt.Stream:
    """An empty cache, TensorRT for RTX, and a GPU."""
    found = ort_tensorrt.Stream()
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", ort_tensorrt.module(found, "1.7.1"))
    monkeypatch.setattr(machine, "open_gpu", lambda: found)
    return found


def store(
    path: Path,
    device: Any,
    sizes: EngineSizes,
    made_with: PluginLibrary | None = None,
    **others: str,
) -> Path:
    """Put an engine where `edge build` would, with `--rtx` unless it has plugins."""
    trt = bindings.load("rtx" if made_with is None else "tensorrt")
    with open_bundle(path) as opened:
        found = machine.components(opened, trt, made_with, device)
        graph = path / machine.graph_file(opened)
        weights = None if made_with is None else open_plan(opened).weights
    data = ort_tensorrt.serialized(graph, sizes, weights)
    return cache.store({**found, "kernels": "", "flags": "", **others}, sizes, data, {})


def test_a_talk_is_that_of_onnx_runtime(device: ort_tensorrt.Stream, tmp_path: Path) -> None:
    store(bundle("chat"), device, SIZES)
    loaded: Model = edge.load(bundle("chat"), engine="tensorrt")
    assert isinstance(loaded.engine, TensorRTEngine)
    assert (loaded.engine.chunk, loaded.engine.executor.sizes) == (16, SIZES)
    check_talk(loaded, tmp_path / "talk", window=4, max_tokens=3)


def test_an_engine_of_plugins(
    device: ort_tensorrt.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs the library that it was built with, and writes states in place."""
    path, module = bundle("chat"), ort_tensorrt.module(device)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    file = small_library(tmp_path)
    monkeypatch.setenv(library.VARIABLE, str(file))
    plugins = library.open_library()
    store(path, device, SIZES, plugins)
    loaded = edge.load(path, engine="tensorrt")
    assert module.plugins == [str(file)]
    found = [each.session(window=4).generate("one two", **GREEDY).finish().tokens
             for each in (loaded, model("chat"))]  # fmt: skip
    assert found[0] == found[1]
    store(path, device, SIZES, plugins, plugins="another build")
    with pytest.raises(EngineError, match="the plugin library was another build"):
        edge.load(path, engine="tensorrt")
    monkeypatch.delenv(library.VARIABLE)
    monkeypatch.setattr(library, "places", lambda: (tmp_path / "nowhere" / library.FILE,))
    with pytest.raises(EngineError, match="is not built") as caught:
        edge.load(path, engine="tensorrt")
    assert library.COMMAND in str(caught.value.remedy)


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_drafts_change_nothing(device: ort_tensorrt.Stream, draft: str) -> None:
    """Partial acceptance, and the resulting state."""
    store(bundle("chat"), device, SIZES.model_copy(update={"window": 7}))
    loaded = edge.load(bundle("chat"), engine="tensorrt")
    drafter = model("chat") if draft == "model" else "ngram"
    plain = loaded.session(window=4, seed=3)
    drafting = loaded.session(window=4, seed=3, draft=drafter, draft_tokens=2)
    for prompt in ("one two three one two three one two", " and one two"):
        options = {"temperature": 0, "max_tokens": 9}
        expected = plain.generate(prompt, **options).finish()
        found = drafting.generate(prompt, **options).finish()
        assert found.tokens == expected.tokens == found.tokens
    assert plain.tokens == drafting.tokens
    assert not loaded.engine.trees and model("chat").engine.trees
    with pytest.raises(InputError, match="runs chains, not trees"):
        loaded.session(draft=model("chat"), draft_tree=(2, 1))
    bandit = loaded.session(window=7, draft=model("chat")).drafting
    assert bandit is not None and bandit.window == 7, "a chain of six at most"


def test_perplexity_is_that_of_onnx_runtime(device: ort_tensorrt.Stream, tmp_path: Path) -> None:
    store(bundle("chat"), device, SIZES)
    text = tmp_path / "text.txt"
    text.write_text("one two three and so on " * 8)
    asked = modes.EvalRequest(str(bundle("chat")), [text], window=30, engine="tensorrt")
    facts = modes.divergence(asked, str(bundle("chat")))
    assert facts["engine"] == "tensorrt" and facts["top1_agreement"] == 1
    assert abs(facts["perplexity_ratio"] - 1) < 1e-5 and facts["kl_max"] < 1e-6


def test_no_engine_is_told_with_the_command(device: ort_tensorrt.Stream) -> None:
    path = bundle("chat")
    with open_bundle(path) as opened:
        assert opening.built_kind(opened) == "tensorrt", "what edge build makes if not asked"
    store(path, device, SIZES, graph="another")
    with pytest.raises(EngineError, match="the graph was another") as caught:
        edge.load(path, engine="tensorrt")
    assert f"edge build {path}" in str(caught.value.remedy)
    assert "--rtx" in str(caught.value.remedy)


def test_tensorrt_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EngineError, match="TensorRT") as caught:
        edge.load(bundle("chat"), engine="tensorrt")
    assert str(caught.value.remedy).endswith(bindings.how_to_install("tensorrt"))


def test_sizes_that_it_was_not_built_for(device: ort_tensorrt.Stream) -> None:
    path = bundle("chat")
    store(path, device, SIZES)
    with (
        edge.load(path, engine="tensorrt") as loaded,
        pytest.raises(EngineError, match=facts("window", 9, "built for at most", 4)) as caught,
    ):
        loaded.session(window=9)
    command = f"edge build {path} --window 9 --batch 2 --chunk 16 --rtx"
    assert says(caught.value.remedy, command)


def test_the_engine_built_last_is_the_one(device: ort_tensorrt.Stream) -> None:
    path = bundle("chat")
    small, large = (store(path, device, SIZES.model_copy(update={"window": w})) for w in (2, 6))
    for newer, older, window in ((small, large, 2), (large, small, 6)):
        os.utime(older, (1, 1))
        os.utime(newer)
        with edge.load(path, engine="tensorrt") as loaded:
            assert isinstance(loaded.engine, TensorRTEngine)
            assert loaded.engine.executor.sizes.window == window


def test_an_engine_built_ahead_for_several_gpus(
    device: ort_tensorrt.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle("chat")
    store(path, device, SIZES, sm="0,86,89", gpu="", driver="")
    assert edge.load(path, engine="tensorrt").engine.name == "tensorrt"
    store(path, device, SIZES, sm="86,89", gpu="", driver="")
    monkeypatch.setattr(device, "sm", 75)
    with pytest.raises(EngineError, match="the GPU's architecture was"):
        edge.load(path, engine="tensorrt")


def test_an_engine_of_another_graph(device: ort_tensorrt.Stream) -> None:
    path = bundle("chat")
    stored = store(path, device, SIZES)
    with open_bundle(bundle("hybrid")) as opened:
        other = bundle("hybrid") / machine.graph_file(opened)
    stored.unlink()
    with open_bundle(path) as opened:
        found = machine.components(opened, bindings.load("rtx"), None, device)
    data = ort_tensorrt.serialized(other, SIZES.model_copy(update={"capacity": 64}))
    cache.store({**found, "kernels": "", "flags": ""}, SIZES, data, {})
    with pytest.raises(EngineError, match=r"this bundle's graph: .* and \d+ more"):
        edge.load(path, engine="tensorrt")
