"""TensorRT's Python package: absent, without libraries, too old, found; and the remedies."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge.apps import build
from edge.apps.cli import app
from edge.errors import EdgeError, EngineError
from edge.runtime.tensorrt import bindings
from tests.facts import facts, says

ABSENT = importlib.util.find_spec("tensorrt") is None
RTX = importlib.util.find_spec("tensorrt_rtx_bindings") is not None


def _imported() -> list[str]:
    names = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")
    return [name for name in sys.modules if name.split(".")[0] in names]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that comes first on the import path."""
    for name in _imported():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    # later tests must not find these modules; the real ones are imported again when needed
    for name in _imported():
        del sys.modules[name]


def package(folder: Path, name: str, text: str | None) -> None:
    (folder / name).mkdir()
    if text is not None:
        (folder / name / "__init__.py").write_text(text)


REAL = "class Builder: ...\nclass OnnxParser: ...\n__version__ = '%s'\n"


@pytest.mark.skipif(not ABSENT, reason="TensorRT is installed here")
def test_without_tensorrt_the_step_that_installs_it_is_told() -> None:
    with pytest.raises(EngineError, match=facts("not installed", "this Python")) as caught:
        bindings.load()
    assert caught.value.field == "tensorrt"
    assert caught.value.remedy is not None and "install" in caught.value.remedy


@pytest.mark.skipif(not ABSENT, reason="TensorRT is installed here")
def test_the_command_says_so_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edge.apps.cli", "build", "demo"], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: tensorrt: TensorRT is not installed")


def test_nothing_of_it_is_imported_with_edge() -> None:
    code = (
        "import sys, edge, edge.runtime.tensorrt, edge.runtime.tensorrt.bindings, "
        "edge.runtime.tensorrt.build, edge.apps.cli\n"
        "print([n for n in sys.modules if n.startswith('tensorrt')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.skipif(not RTX, reason="TensorRT for RTX is not here: run `make test`")
def test_tensorrt_for_rtx_is_found() -> None:
    found = bindings.load("rtx")
    assert found.kind == "rtx" and found.version >= (1, 7)
    assert found.title.startswith("TensorRT for RTX 1.")


@pytest.mark.parametrize("text", [None, "", "__version__ = '10.3.0'\n"])
def test_a_placeholder_is_told_from_the_real_one(packages: Path, text: str | None) -> None:
    package(packages, "tensorrt", text)
    with pytest.raises(EngineError, match="it is a placeholder") as caught:
        bindings.load()
    assert caught.value.remedy == bindings.how_to_install("tensorrt")


@pytest.mark.parametrize(
    "text",
    [
        "import ctypes; ctypes.CDLL('libnvinfer.so.99')",
        "raise FileNotFoundError('libnvinfer.so.10')",
        "import tensorrt_bindings_that_are_not_there",
        "from sys import nothing_of_that_name",
    ],
)
def test_a_package_without_its_libraries_is_told(packages: Path, text: str) -> None:
    package(packages, "tensorrt", text)
    with pytest.raises(EngineError, match=facts("libraries", "missing")):
        bindings.load()


@pytest.mark.parametrize("version", ["8.6.1", "10.2.0.19", "7.1"])
def test_too_old_a_tensorrt_is_refused(packages: Path, version: str) -> None:
    package(packages, "tensorrt", REAL % version)
    with pytest.raises(EngineError, match=r"at least 10\.3 is needed"):
        bindings.load()


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("10.3.0.26", (10, 3, 0)), ("10.16.1.11", (10, 16, 1)), ("11.4", (11, 4, 0))],
)
def test_its_version_has_three_numbers(
    packages: Path, version: str, numbers: tuple[int, ...]
) -> None:
    package(packages, "tensorrt", REAL % version)
    assert bindings.load().version == numbers


def test_a_version_that_is_none_is_refused(packages: Path) -> None:
    package(packages, "tensorrt", REAL % "new")
    with pytest.raises(EngineError, match="its version is 'new'"):
        bindings.load()


def test_either_name_of_tensorrt_for_rtx_will_do(packages: Path) -> None:
    package(packages, "tensorrt_rtx_bindings", REAL % "1.9.0")
    assert bindings.load("rtx").version == (1, 9, 0)
    package(packages, "tensorrt_rtx", REAL % "1.8.0")
    importlib.invalidate_caches()
    assert bindings.load("rtx").version == (1, 8, 0)


@pytest.mark.skipif(not ABSENT, reason="TensorRT is installed here")
def test_where_only_tensorrt_for_rtx_is_its_flag_is_named(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(packages, "tensorrt_rtx", REAL % "1.8.0")
    monkeypatch.setenv(build.VARIABLE, "1")  # as in the process that builds
    done = CliRunner().invoke(app, ["build", "demo"])
    assert isinstance(done.exception, EdgeError) and done.stdout == ""
    said = str(done.exception)
    assert "TensorRT is not installed" in said
    assert says(said, "edge build BUNDLE --rtx", "TensorRT for RTX 1.8.0")
    assert bindings.how_to_install("tensorrt") in said


def test_what_cannot_be_imported_is_not_recommended(packages: Path) -> None:
    package(packages, "tensorrt_rtx", "")
    package(packages, "tensorrt_rtx_bindings", "raise OSError('libtensorrt_rtx.so.1')")
    sys.modules["tensorrt"] = None  # type: ignore[assignment]
    with pytest.raises(EngineError, match="TensorRT is not installed") as caught:
        bindings.load()
    assert caught.value.remedy == bindings.how_to_install("tensorrt")


def test_old_numbers_of_tensorrt_for_rtx_are_not_tensorrt_s(packages: Path) -> None:
    package(packages, "tensorrt_rtx", REAL % "1.0.0")
    assert bindings.load("rtx").kind == "rtx"


@pytest.mark.parametrize(
    ("release", "parts"),
    [
        ("# R36 (release), REVISION: 4.4\n", ("JetPack 6", "3.10", "apt install", "site-packages")),
        ("# R39 (release), REVISION: 2.0\n", ("JetPack 7", "3.12", "apt install", "site-packages")),
        ("# R41 (release), REVISION: 1.0\n", ("JetPack", "that of the system", "apt install")),
        ("nonsense", ("pip install tensorrt-cu",)),
        (None, ("pip install tensorrt-cu",)),
    ],
)
def test_each_platform_has_its_step(
    tmp_path: Path, release: str | None, parts: tuple[str, ...]
) -> None:
    file = tmp_path / "nv_tegra_release"
    if release is not None:
        file.write_text(release)
    said = bindings.how_to_install("tensorrt", file)
    assert all(part in said for part in parts)


@pytest.mark.parametrize(
    ("system", "machine", "part"),
    [
        ("linux", "x86_64", "pip install tensorrt-rtx-cu13-libs"),
        ("win32", "AMD64", "pip install tensorrt-rtx-cu13-libs"),
        ("linux", "aarch64", "runs on x86-64 only"),
    ],
)
def test_tensorrt_for_rtx_is_not_promised_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, part: str
) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert part in bindings.how_to_install("rtx")
