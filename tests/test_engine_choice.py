"""`--engine auto` means `cpu` where it can run the bundle, else `ort` with the reason."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import edge
from edge.apps.chat.commands import COMMANDS, Chat
from edge.apps.doctor.checks import chosen_engine
from edge.errors import EngineError
from edge.plugins.cpu import library
from edge.runtime.model import resolve
from edge.runtime.ort_providers import VARIABLE


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share no engine: these tests check how each is opened."""
    monkeypatch.setattr("edge.runtime.model.ENGINES_IN_USE", MagicMock(get=lambda key: None))


compiled = pytest.mark.skipif(library.path() is None, reason="needs the kernels for CPUs")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(library.SET_VARIABLE, raising=False)


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library.library.cache_clear()
    monkeypatch.setattr(library, "path", lambda: None)
    yield
    library.library.cache_clear()


@pytest.fixture(scope="module")
def without_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choice") / "bundle"
    shutil.copytree(resolve("demo-draft"), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    file = manifest["graphs"].pop("cuda")
    manifest["files"] = [entry for entry in manifest["files"] if entry["path"] != file]
    (folder / file).unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@compiled
def test_the_engine_cpu_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    model = edge.load("demo-draft")
    assert model.engine.name == "cpu" and model.engine.passed_over is None
    assert chosen_engine("demo-draft") == ("ok", "runs demo-draft on cpu", None)
    monkeypatch.setenv(library.SET_VARIABLE, "none such")
    with pytest.raises(EngineError, match=r"EDGE_CPU_SET.*choose plain"):
        edge.load("demo-draft")


def test_who_names_a_provider_means_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [edge.load("demo-draft", provider="cpu").engine]
    monkeypatch.setenv(VARIABLE, "cpu")
    found.append(edge.load("demo-draft").engine)
    assert all(engine.name == "ort" and engine.passed_over is None for engine in found)


@compiled
def test_a_bundle_without_a_plan(without_plan: Path) -> None:
    session = edge.load(without_plan).session()
    assert session.model.engine.name == "ort"
    status, detail, remedy = chosen_engine(str(without_plan))
    assert status == "ok" and detail.startswith(f"runs {without_plan} on ort, not on cpu: ")
    assert remedy is not None and "--target cpu" in remedy
    shown = COMMANDS["/show"].run(Chat(session, "copy", {}), "")
    assert detail.partition(": ")[2].partition(",")[0] in shown


@pytest.mark.usefixtures("not_compiled")
def test_kernels_that_were_not_compiled() -> None:
    _, detail, remedy = chosen_engine("demo-draft")
    assert detail.startswith("runs demo-draft on ort, not on cpu: ")
    assert remedy is not None and "C++ compiler" in remedy
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "edge.runtime.ort", None)
        patch.setitem(sys.modules, "onnxruntime", None)
        patch.delitem(sys.modules, "edge.onnx_runtime")
        patch.delitem(sys.modules, "edge.runtime.ort")
        with pytest.raises(EngineError, match=r"not compiled.*not installed") as caught:
            edge.load("demo-draft")
    assert "C++ compiler" in str(caught.value.remedy) and "mamba-edge[ort]" in str(caught.value)


@compiled
def test_a_conversation_moves_between_engines(tmp_path: Path) -> None:
    told = []
    for name in ("cpu", "ort"):
        session = edge.load("demo-draft", engine=name).session()
        session.chat("Hello!", max_tokens=6, temperature=0).finish()
        session.save(tmp_path / f"{name}.state")
        told.append(session.chat("And you?", max_tokens=6, temperature=0).finish().tokens)
    for name, other in (("cpu", "ort"), ("ort", "cpu")):
        session = edge.load("demo-draft", engine=other).session()
        session.load(tmp_path / f"{name}.state")
        told.append(session.chat("And you?", max_tokens=6, temperature=0).finish().tokens)
    assert told == [told[0]] * 4
