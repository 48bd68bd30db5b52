"""Kernels are loaded at the right time in the right way, and every refusal of the driver is
reported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.fake_driver import driver
from tests.tensorrt.plugin_host import VARIABLE, library

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of `loading`."""
    host, plugins = str(library().path), os.environ.get(VARIABLE)
    log = tmp_path_factory.mktemp("loading") / "log"
    script = str(Path(__file__).with_name("loading.py"))
    environment = {name: text for name, text in os.environ.items() if "FAKE_CUDA" not in name}
    run = subprocess.run(
        [sys.executable, script, str(driver()), host, *([plugins] if plugins else [])],
        capture_output=True,
        text=True,
        env={
            **environment,
            "FAKE_CUDA_LOG": str(log),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        },
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def test_what_is_not_there_is_told(found: dict[str, Any]) -> None:
    missing = found["without_a_driver"]
    # a machine with a GPU has a driver, but nobody made a context
    assert "there is no NVIDIA driver: libcuda.so.1" in missing or "CUDA" in missing
    assert "no CUDA context is current" in found["without_a_context"]


def test_code_that_cannot_be_loaded_is_told_and_can_be_tried_again(found: dict[str, Any]) -> None:
    refused, then = found["code_that_the_gpu_cannot_run"]
    assert "sm_87" in refused and "CUDA_ERROR_NO_BINARY_FOR_GPU (209)" in refused
    assert then == ""
    missing = found["a_kernel_that_is_not_in_its_code"]
    assert "finding k: CUDA_ERROR_NOT_FOUND (500)" in missing


def test_a_kernel_of_other_parameters_is_refused(found: dict[str, Any]) -> None:
    for count, reason in zip((5, 7, 6, 6), found["other_parameters"], strict=True):
        assert f"k takes {count} parameters, " in reason


def test_grids_blocks_and_hidden_parameters(found: dict[str, Any]) -> None:
    """3·2 rows; an empty product counts as one; ceil(5·2/3)."""
    (line,) = found["what_is_launched"]
    assert line.startswith("launch good grid=6,1,4 block=64,1,1 shared=0 arguments=")
    size, half, *hidden = line.rpartition("=")[2].split(",")[2:]
    assert (size, half) == ("06000000", "0000003f")
    assert hidden == ["0" * 16] * 2


def test_shared_memory_is_asked_for(found: dict[str, Any]) -> None:
    line, refused = found["shared_memory"]
    assert " shared=102400 " in line
    assert "CUDA_ERROR_INVALID_VALUE (1)" in refused


def test_launches_that_fail_are_told(found: dict[str, Any]) -> None:
    refused, then = found["a_launch_that_fails"]
    assert "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)" in refused
    assert then == ""


def test_sizes_that_no_kernel_takes_are_refused(found: dict[str, Any]) -> None:
    high, far, long, fits, vast = found["sizes_that_no_kernel_takes"]
    assert "k: " in high and "120000" in high and "65535" in high
    assert "k: " in far and str(1 << 31) in far and str((1 << 31) - 1) in far
    assert "k: " in long and str(6 << 40) in long
    assert "k: " in vast and str(1 << 60) in vast
    assert fits == ""


def test_code_is_loaded_once_and_unloaded_with_the_last(found: dict[str, Any]) -> None:
    name = "code_is_loaded_once_and_unloaded_with_the_last_that_needs_it"
    assert found[name] == [2, 2, 2, 0]


def test_nothing_is_loaded_while_a_graph_is_recorded(found: dict[str, Any]) -> None:
    seen = found["while_a_graph_is_recorded"]
    if seen is None:
        pytest.skip("needs the plugin library: see tests/tensorrt/plugin_host.py")
    refused, ended, then = seen
    assert "while a graph is recorded" in refused
    assert ended == 0, "what was recorded is whole"
    assert then == ""
