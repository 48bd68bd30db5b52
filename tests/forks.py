"""Functions of test modules in processes of their own, which are spared the imports.

One process a kind of environment imports what is slow to import, and starts nothing. Each function
runs in a fork of it, which imports the rest and ends as a Python process does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

# slow to import, and without threads of their own; ONNX Runtime has some
_SLOW = (
    "numpy", "torch", "transformers", "transformers.modeling_utils", "onnx", "onnx.reference",
    "pytest", "pydantic", "safetensors.torch",
)  # fmt: skip
_ROOT = Path(__file__).parent.parent


def call(
    module: str, name: str, arguments: list[str], *, environment: Mapping[str, str], timeout: float
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `module.name(*arguments)`.

    `environment` is added to this process's. Raises TimeoutError, and leaves no process behind.
    """
    global _kept
    if _kept is None or _kept.environment != environment or _kept.ended():
        if _kept is not None:
            _kept.end()
        _kept = _Parent(environment)
    asked = {"module": module, "name": name, "arguments": arguments}
    return _kept.call(asked | {"environment": {**os.environ, **environment}}, timeout)


class _Parent:
    """The process that forks. Its forks are in its process group."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"], cwd=_ROOT, env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def ended(self) -> bool:
        return self._process.poll() is not None

    def call(self, asked: dict[str, object], timeout: float) -> tuple[int, str, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            line = json.dumps(asked | {"out": f"{folder}/out", "err": f"{folder}/err"})
            timer = threading.Timer(timeout, self.end)
            timer.start()
            try:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except BaseException:
                self.end()
                raise
            finally:
                timer.cancel()
            if not answer:
                raise TimeoutError(f"{asked} did not end within {timeout} s")
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
            return int(answer), out, err

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_kept: _Parent | None = None


def main() -> None:
    """Read what is to be run from stdin, a line each, and answer with exit statuses."""
    for name in _SLOW:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(**asked)
            return
        answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.buffer.write(f"{answer}\n".encode())
        sys.stdout.buffer.flush()


def _run(
    module: str, name: str, arguments: list[str], environment: dict[str, str], out: str, err: str
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    getattr(importlib.import_module(module), name)(*arguments)


if __name__ == "__main__":
    main()
