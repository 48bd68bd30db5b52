"""How Python finds the plugin library: its path, its ABI, and its TensorRT version.

The library's own tests cover its contents; here small C libraries have its functions.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from edge.errors import EngineError
from edge.runtime.tensorrt import library
from edge.runtime.tensorrt.bindings import TensorRT
from tests.facts import facts

SOURCE = """
#include <stddef.h>
int edge_tensorrt_abi(void) { return %(abi)d; }
const char *edge_tensorrt_built_for(void) { return "%(built_for)s"; }
static int aliased;
int edge_tensorrt_set_aliased(int on) { aliased = on; return 0; }
int edge_tensorrt_set_kernels(const void *bytes, size_t size) {
  return size == 0 || (size == 3 && ((const char *)bytes)[2] == 'c' && aliased) ? 0 : -1;
}
const char *edge_tensorrt_last_error(void) { return "it is torn"; }
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)


def compiled(folder: Path, source: str) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is needed to make a library")
    text, out = folder / "library.c", folder / library.FILE
    text.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", out, text], check=True)
    return out


def plugins(folder: Path, abi: int = library.ABI, built_for: str = "10.3") -> Path:
    return compiled(folder, SOURCE % {"abi": abi, "built_for": built_for})


def test_a_library_is_found_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plugins(tmp_path)
    for named in (path, tmp_path):
        monkeypatch.setenv(library.VARIABLE, str(named))
        assert library.find() == path
    found = library.open_library()
    assert found is library.open_library(), "it is loaded once"
    assert (found.built_for, len(found.digest)) == ("10.3", 64)


def test_a_variable_that_names_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "nowhere.so"))
    with pytest.raises(EngineError, match="file not found") as caught:
        library.open_library()
    assert caught.value.field == library.VARIABLE


def test_a_checkout_s_build_folder_is_looked_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "edge"
    package.mkdir()
    monkeypatch.setattr(library.edge, "__file__", str(package / "__init__.py"))
    with pytest.raises(EngineError, match="is not built") as caught:
        library.find()
    assert caught.value.remedy is not None and "make plugins TENSORRT_INCLUDE=" in str(caught.value)
    (tmp_path / "build" / "tensorrt").mkdir(parents=True)
    built = plugins(tmp_path / "build" / "tensorrt")
    assert library.find() == built
    (package / "plugins" / "tensorrt" / "lib").mkdir(parents=True)
    installed = package / "plugins" / "tensorrt" / "lib" / library.FILE
    shutil.copy(built, installed)
    assert library.find() == installed, "what is installed comes first"


def test_another_abi_is_refused(tmp_path: Path) -> None:
    path = plugins(tmp_path, abi=library.ABI + 1)
    with pytest.raises(EngineError, match=f"has ABI {library.ABI + 1}, .* needs {library.ABI}"):
        library.open_library(path)


@pytest.mark.parametrize("source", ["int nothing;", "int edge_tensorrt_abi(void) { return 1; }"])
def test_another_library_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(EngineError, match="not a plugin library"):
        library.open_library(compiled(tmp_path, source))


@pytest.mark.parametrize("data", [b"", b"not a library", b"\x7fELF" + bytes(100)])
def test_what_is_no_library_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / library.FILE
    path.write_bytes(data)
    with pytest.raises(EngineError, match="cannot be loaded") as caught:
        library.open_library(path)
    assert caught.value.file == str(path)


def tensorrt(*version: int) -> TensorRT:
    return TensorRT("tensorrt", ModuleType("tensorrt"), version)


@pytest.mark.parametrize("built_for", ["10.3", "10.16", "11.1"])
def test_a_library_for_another_major_version_is_refused(tmp_path: Path, built_for: str) -> None:
    found = library.open_library(plugins(tmp_path, built_for=built_for))
    for version in ((10, 3, 0), (11, 4, 0), (1, 7, 1)):
        if built_for.startswith(f"{version[0]}."):
            found.check(tensorrt(*version))
            continue
        with pytest.raises(EngineError, match=f"was built for TensorRT {built_for}"):
            library.register(tensorrt(*version), found)


def test_kernels_go_to_the_library_and_its_words_come_back(tmp_path: Path) -> None:
    found = library.open_library(plugins(tmp_path))
    found.prepare(b"abc", aliased=True)
    with pytest.raises(EngineError, match=facts("kernels", "it is torn")):
        found.prepare(b"abc", aliased=False)
    found.prepare(b"", aliased=False)
