"""C and C++ of the tests, compiled once per run and shared by its processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

FOLDER = "EDGE_TEST_COMPILED"  # cache of this run; the tests' conftest creates and removes it


@cache
def compiled(name: str, compiler: str, *arguments: str, source: str | None = None) -> Path:
    """Compile `arguments`, with `source` as standard input, into a file `name` in its own folder.
    Skips the test when the compiler is missing.
    """
    found = shutil.which(compiler)
    if found is None or not sys.platform.startswith("linux"):
        pytest.skip(f"needs Linux and {compiler}")
    key = hashlib.sha256(repr((name, found, arguments, source)).encode()).hexdigest()[:16]
    folder = Path(os.environ[FOLDER]) / key
    folder.mkdir(exist_ok=True)
    out, partial = folder / name, folder / "partial"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            subprocess.run(
                [found, *arguments, "-o", partial], input=source, text=True, check=True
            )  # fmt: skip
            partial.rename(out)
    return out
