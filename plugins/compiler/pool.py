"""Worker processes that compile in parallel, each in a clean environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge import child
from edge.errors import ExportError
from edge.launch import CompiledKernel, Variant

# Number of parallel workers, at a quarter of a gigabyte each.
PARALLEL = max(2, min(8, (os.cpu_count() or 1) // 2))
# Seconds allowed per kernel; the slowest take a few. An untrusted plan must not compile forever.
LIMIT = 300.0
TOOLS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
# Other variables may change Triton's output (its own, LLVM's, ptxas options).
_KEPT_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV",
    *TOOLS,
)  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel, and the version of ptxas that compiled it."""

    kernel: CompiledKernel
    ptxas: str
    cubin: bytes


class Worker:
    """One worker process, used as a context manager. Each thread needs its own."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="mamba-edge-compile-")
        folder = Path(self._scratch.name)
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                child.command("edge.plugins.compiler.worker"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                cwd=folder, env=_environment(folder), start_new_session=True,
            )  # fmt: skip

    def compile(self, variant: Variant, sm: int) -> Compiled:
        """Compile a variant. Raises ExportError, which names the kernel, when that fails."""
        limit = threading.Timer(LIMIT, self._kill)
        limit.start()
        try:
            answer, cubin = self._ask({"variant": variant.model_dump(mode="json"), "sm": sm})
        finally:
            limit.cancel()
        if "error" in answer:
            raise ExportError(
                f"cannot be compiled for sm_{sm}: {answer['error']}",
                field=variant.kernel,
                remedy=answer.get("remedy"),
            )
        return Compiled(CompiledKernel.model_validate(answer["kernel"]), answer["ptxas"], cubin)

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            return self._exit_error(), b""
        answer = json.loads(line)
        cubin = self._process.stdout.read(answer["bytes"])
        return (answer, cubin) if len(cubin) == answer["bytes"] else (self._exit_error(), b"")

    def _exit_error(self) -> dict[str, Any]:
        """Return an error in place of the missing answer of a worker that ended."""
        status = self._process.wait()
        last_line = self._log.read_text("utf-8", "replace").strip().splitlines()[-1:]
        reason = f"the compiler exited with {status}: {''.join(last_line)}"
        if status == -signal.SIGKILL:
            reason = (
                f"the compiler was killed: it took more than {LIMIT:.0f} s or ran out of memory"
            )
        return {"error": reason}

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # ptxas too, which the worker started

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._process.communicate()
        self._scratch.cleanup()


def compile_each(
    jobs: Iterable[tuple[Variant, int]], done: Callable[[Variant, int, Compiled], None]
) -> None:
    """Compile every (variant, sm) and call `done` for each, one at a time, in any order.

    Raises ExportError for the first that fails; the others are abandoned.
    """
    pending, lock = list(jobs), threading.Lock()
    queue: Iterator[tuple[Variant, int]] = iter(pending)
    failed = threading.Event()

    def work() -> None:
        with Worker() as worker:
            while not failed.is_set():
                with lock:
                    job = next(queue, None)
                if job is None:
                    return
                try:
                    compiled = worker.compile(*job)
                    with lock:
                        done(*job, compiled)
                except BaseException:
                    failed.set()
                    raise

    count = min(PARALLEL, len(pending))
    with ThreadPoolExecutor(max(1, count)) as threads:
        running = [threads.submit(work) for _ in range(count)]
        try:
            for future in running:
                future.result()
        finally:  # an interrupt lands here
            failed.set()


def _environment(folder: Path) -> dict[str, str]:
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return environment | {
        "TMPDIR": str(folder),
        "TRITON_HOME": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        # line tables would put this machine's paths into the cubins
        "TRITON_DISABLE_LINE_INFO": "1",
    }
