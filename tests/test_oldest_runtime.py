"""The oldest supported ONNX Runtime runs the embedded bundles like the newest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).parent / "oldest_runtime.py"
OLDEST = Path(sys.prefix) / "oldest"  # `make test` installs onnxruntime 1.23.2 there


@cache
def run(*, oldest: bool) -> tuple[str, dict[str, list[float]]]:
    """Return what the checks say, and the logits of each bundle."""
    environment = dict(os.environ)
    if oldest:
        environment["PYTHONPATH"] = str(OLDEST)
    command = [sys.executable, str(PROGRAM), "--logits"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said, logits = done.stdout.splitlines()
    return said, json.loads(logits)


needs_oldest = pytest.mark.skipif(
    not (OLDEST / "onnxruntime").is_dir(), reason="onnxruntime 1.23.2 is not there: run `make test`"
)


def test_the_installed_runtime_passes() -> None:
    assert run(oldest=False)[0].startswith("ok: ")


@needs_oldest
def test_the_oldest_runtime_passes() -> None:
    assert "onnxruntime 1.23.2" in run(oldest=True)[0]


@needs_oldest
def test_both_give_the_same_logits() -> None:
    newest, oldest = (run(oldest=which)[1] for which in (False, True))
    assert newest.keys() == oldest.keys() and len(newest) > 2
    for name in newest:
        np.testing.assert_allclose(oldest[name], newest[name], atol=1e-3, err_msg=name)


# every eleventh case of a test: not in step with its parameters, which have 2, 3, 4, 7 or 13 values
_PYTEST = """
import sys, onnxruntime, pytest
assert onnxruntime.__version__ == "1.23.2"
from edge import cpu
if cpu.has_amx():
    sys.exit(77)

class EveryEleventh:
    def pytest_collection_modifyitems(self, items):
        cases = {}
        for item in items:
            cases.setdefault((item.path, item.originalname), []).append(item)
        items[:] = [case for several in cases.values() for case in several[::11]]

sys.exit(pytest.main(sys.argv[1:], plugins=[EveryEleventh()]))
"""
FILES = ("test_ops_quantized.py", "test_ops_quantized_folding.py", "test_ops_quantized_fused.py",
         "test_ops_quantized_recurrent.py", "test_graph_quantized.py",
         "test_device_ops.py")  # fmt: skip


@needs_oldest
def test_int8_ops_and_graphs_agree_with_their_references_there_too() -> None:
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    options = ["-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", _PYTEST, *options, *files],
        env=dict(os.environ, PYTHONPATH=str(OLDEST)), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("1.23.2 multiplies int8 wrongly on CPUs with AMX (tests/test_ort_amx.py)")
    assert done.returncode == 0, done.stdout + done.stderr
