"""The plugin library's build, with every available TensorRT, and its message without one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins" / "tensorrt"
HEADERS = "EDGE_TENSORRT_HEADERS"


@pytest.fixture
def cmake() -> str:
    found = shutil.which("cmake")
    if found is None or not (shutil.which("g++") or shutil.which("c++")):
        pytest.skip("needs cmake and a C++ compiler: pip install cmake")
    return found


def test_without_headers_nothing_is_built_and_it_is_said_why(cmake: str, tmp_path: Path) -> None:
    # a search confined to an empty folder, wherever headers are installed
    empty = ["-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY", f"-DCMAKE_FIND_ROOT_PATH={tmp_path}"]
    build = tmp_path / "build"
    configured = subprocess.run(
        [cmake, "-S", str(PLUGINS), "-B", str(build), *empty], capture_output=True, text=True
    )
    assert configured.returncode == 0, configured.stderr
    assert (
        "edge_tensorrt is not built: no NvInferRuntime.h; -DTENSORRT_INCLUDE" in configured.stdout
    )
    built = subprocess.run([cmake, "--build", str(build)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert not list(build.rglob("*.so"))


def test_every_tensorrt_at_hand_compiles_it_without_warnings(cmake: str) -> None:
    folders = os.environ.get(HEADERS, "")
    if not folders:
        pytest.skip(
            f"needs TensorRT's headers: {HEADERS}=FOLDER:FOLDER pytest {Path(__file__).name}"
        )
    run = subprocess.run([str(PLUGINS / "matrix.sh")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines() == [f"compiled: {folder}" for folder in folders.split(":")]
