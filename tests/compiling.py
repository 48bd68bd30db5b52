"""C and C++ of the tests, compiled once per run and shared by its processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
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

    def compile_into(folder: Path) -> None:
        command = [found, *arguments, "-o", folder / name]
        subprocess.run(command, input=source, text=True, check=True)

    return once((name, found, arguments, source), compile_into) / name


def once(key: object, make: Callable[[Path], None]) -> Path:
    """Return the folder of `key`, which `make` fills in the first process of the run to ask."""
    folder = Path(os.environ[FOLDER]) / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    made = folder / "made"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            make(folder)
            made.touch()
    return folder
