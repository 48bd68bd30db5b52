"""`edge doctor`: TensorRT, the plugin library, an engine; and whether the requested engine runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from edge.apps import doctor as doctor_command
from edge.apps.doctor import checks as doctor_checks
from edge.apps.doctor import tensorrt as doctor_tensorrt
from edge.apps.doctor.checks import Finding, judged
from edge.errors import EngineError
from edge.runtime.cuda import install
from edge.runtime.tensorrt import bindings, library
from tests.facts import says
from tests.session_models import bundle
from tests.tensorrt import ort_tensorrt
from tests.tensorrt.test_open_library import compiled
from tests.tensorrt.test_open_library import plugins as made
from tests.tensorrt.test_opening import SIZES, device, store

__all__ = ["device"]


@pytest.mark.parametrize(
    ("number", "shown"), [(100300, "10.3.0"), (110_104, "11.1.4"), (8601, "8.6.1")]
)
def test_tensorrt_without_its_python_module(
    number: int, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"int getInferLibVersion(void) {{ return {number}; }}"
    path = compiled(tmp_path, source)
    monkeypatch.setattr(doctor_tensorrt, "LIBRARIES", ("libnvinfer-none.so", str(path)))
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    found = judged("tensorrt", doctor_tensorrt.tensorrt, "")
    assert found.status == "broken" and f"{path} {shown} is installed; " in found.detail
    assert found.remedy == bindings.how_to_install("tensorrt")
    monkeypatch.setattr(doctor_tensorrt, "LIBRARIES", ())
    assert judged("tensorrt", doctor_tensorrt.tensorrt, "").status == "absent"


def test_either_tensorrt_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    rtx = ort_tensorrt.module(ort_tensorrt.Stream(), "1.7.1.2")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", rtx)
    assert doctor_tensorrt.tensorrt("") == ("ok", "TensorRT for RTX 1.7.1", None)
    monkeypatch.setattr(library, "places", tuple)
    status, _, remedy = doctor_tensorrt.plugins("")
    assert status == "absent" and str(remedy).startswith("--rtx needs none; build it")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    assert str(doctor_tensorrt.plugins("")[2]).startswith("build it")


def test_the_plugin_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "none.so"))
    found = judged("plugins", doctor_tensorrt.plugins, "")
    assert (found.status, found.detail, found.remedy) == (
        "broken", "file not found", library.COMMAND,
    )  # fmt: skip
    monkeypatch.delenv(library.VARIABLE)
    monkeypatch.setattr(library, "places", lambda: (tmp_path / "lib" / library.FILE,))
    found = judged("plugins", doctor_tensorrt.plugins, "")
    assert found.status == "absent" and library.COMMAND in str(found.remedy)
    folders = tmp_path / "good", tmp_path / "odd"
    for folder in folders:
        folder.mkdir()
    good, odd = made(folders[0]), made(folders[1], abi=99)
    monkeypatch.setenv(library.VARIABLE, str(good))
    found = judged("plugins", doctor_tensorrt.plugins, "")
    assert found.status == "absent", "nothing to load it into"
    assert says(found.detail, good, f"ABI {library.ABI}", "TensorRT 10.3", "TensorRT is not")
    monkeypatch.setenv(library.VARIABLE, str(odd))
    found = judged("plugins", doctor_tensorrt.plugins, "")
    assert found.status == "broken" and "has ABI 99" in found.detail


def test_the_engine(device: ort_tensorrt.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(bundle("chat"))
    monkeypatch.setattr(install, "driver_version", lambda: 13000)
    monkeypatch.setitem(sys.modules, "tensorrt", ort_tensorrt.module(device, "10.3.0"))
    found = judged("tensorrt engine", doctor_tensorrt.tensorrt_engine, path)
    assert (found.status, found.remedy) == ("absent", f"build it: edge build {path}")
    store(bundle("chat"), device, SIZES)
    monkeypatch.setattr(install, "driver_version", lambda: None)
    found = judged("tensorrt engine", doctor_tensorrt.tensorrt_engine, path)
    assert found.status == "absent" and "no NVIDIA driver" in found.detail
    monkeypatch.setattr(install, "driver_version", lambda: 13000)
    found = judged("tensorrt engine", doctor_tensorrt.tensorrt_engine, path)
    assert (found.status, found.remedy) == ("ok", None)
    assert says(found.detail, "ONNX Runtime's by at most")
    store(bundle("chat"), device, SIZES).unlink()
    store(bundle("chat"), device, SIZES, sm="86")
    found = judged("tensorrt engine", doctor_tensorrt.tensorrt_engine, path)
    assert found.status == "broken" and "the GPU's architecture was 86, is 0" in found.detail


def test_a_build_is_recommended_only_if_it_can_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(bundle("bytes"))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    rtx = ort_tensorrt.module(ort_tensorrt.Stream(), "1.7.1.2")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", rtx)
    monkeypatch.setattr(install, "driver_version", lambda: 13000)
    found = judged("tensorrt engine", doctor_tensorrt.tensorrt_engine, path)
    assert (found.status, found.remedy) == ("absent", f"build it: edge build {path} --rtx")
    monkeypatch.setattr(install, "driver_version", lambda: None)
    found = judged("tensorrt engine", doctor_tensorrt.tensorrt_engine, path)
    assert (found.status, found.remedy) == ("absent", None)
    assert says(found.detail, "none can be", "no NVIDIA driver")


# -- the requested engine -------------------------------------------------------------------------


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    """Return findings of every check by its name: all is well."""
    found = {name: Finding(name, "ok", "well") for name in doctor_checks.CHECKS}
    monkeypatch.setattr(doctor_checks, "examine", lambda name, _: found[name])
    return found


@pytest.mark.parametrize("engine", doctor_checks.ENGINES)
def test_an_engine_that_cannot_run_is_an_error(
    engine: str, findings: dict[str, Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    doctor_command.doctor("demo", engine)
    name, _ = doctor_checks.ENGINES[engine]
    findings[name] = Finding(name, "absent", "is not there", "put it there")
    with pytest.raises(EngineError, match="cannot run here: is not there") as caught:
        doctor_command.doctor("demo", engine, True)
    assert (caught.value.field, caught.value.remedy) == (f"engine {engine}", "put it there")
    out = capsys.readouterr().out
    assert len(json.loads(out[out.index("{") :])["checks"]) == len(doctor_checks.CHECKS)
    doctor_command.doctor("demo")


def test_what_an_engine_needs_is_fixed_first(findings: dict[str, Finding]) -> None:
    findings["tensorrt engine"] = Finding("tensorrt engine", "absent", "none", "build it")
    findings["tensorrt"] = Finding("tensorrt", "absent", "not installed", "install it")
    with pytest.raises(EngineError) as caught:
        doctor_command.doctor("demo", "tensorrt")
    assert caught.value.remedy == "install it"
