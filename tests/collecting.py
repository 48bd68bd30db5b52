"""Pytest command lines written for another machine, run as far as possible on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def assert_collected(arguments: list[str], files: list[str]) -> None:
    """Check that a machine with a GPU would run these tests: their files are imported as they would
    be there.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, *arguments, "--collect-only"],
        env=environment | {"EDGE_TEST_DEVICE": "cuda", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [file for file in files if file not in done.stdout] == []
