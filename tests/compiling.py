"""C and C++ of the tests, compiled once a run, whichever of its processes asks first."""

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

FOLDER = "EDGE_TEST_COMPILED"  # where this run keeps it; the tests' conftest makes and removes it


@cache
def compiled(name: str, compiler: str, *arguments: str, source: str | None = None) -> Path:
    """What the compiler makes of `arguments`, and of `source` as its standard input, as a file
    `name` in a folder of its own. Skips the test where there is no such compiler.
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
