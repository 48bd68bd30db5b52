"""Processes of `edge` and `edge-chat` that need no half second to start Python and import.

Beside each process of pytest, one has imported the programs and loaded a bundle. It forks for each
process that a test asks for; the fork gets its own arguments, environment, folder and files, and
goes on as `python -m MODULE` does. It is a process like any other, with its own signals, threads
and terminal. What a fork cannot show is how Python starts: `Terminal`, `Server` and tests of
imports start a process anew where asked to.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
_MOST = 1 << 17  # bytes of a request: the environment, mostly
# as Python opens them
_STREAMS = (
    (0, "stdin", "r", "strict"), (1, "stdout", "w", "strict"),
    (2, "stderr", "w", "backslashreplace"),
)  # fmt: skip


class Fork:
    """A forked process; its methods are named as those of `subprocess.Popen`."""

    def __init__(
        self, module: str, *arguments: str, files: tuple[int, int, int] | None = None,
        terminal: str | None = None, environment: dict[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:  # fmt: skip
        """Start `python -m MODULE`, or `python -c` with a program.

        Either `files` are its standard streams, or `terminal` is the path of the one that it leads.
        `environment`: all variables, those of the tests by default.
        """
        assert files or terminal, "its standard input would be the socket of all requests"
        self.returncode: int | None = None
        self._status, status = socket.socketpair()
        asked = {
            "arguments": arguments, "module": module, "terminal": terminal, "cwd": str(cwd),
            "environment": dict(os.environ) if environment is None else environment,
        }  # fmt: skip
        with status:
            fds = [status.fileno(), *(files or ())]
            if _forking.cache_info().currsize and _forking()[0].poll() is not None:
                _forking.cache_clear()  # its end fails one test, and not all that follow
            request = json.dumps(asked).encode()
            assert len(request) <= _MOST
            socket.send_fds(_forking()[1], [request], fds)
        self._said = self._status.makefile()
        self.pid = self._told()

    def _told(self) -> int:
        if line := self._said.readline():
            return int(line)
        raise RuntimeError("the process that forks has ended")

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = self._told()
            self._said.close()
            self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            select.select([self._status], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    module: str, *arguments: str, text: bytes = b"", stdin: int | None = None
) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a process.

    Its input is a pipe with `text`, or the file `stdin`.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        read, write = os.pipe()
        with open(read) as given, open(write, "wb", buffering=0) as giving:
            start = given.fileno() if stdin is None else stdin
            plain = os.environ | {"NO_COLOR": "1"}
            files = start, out.fileno(), err.fileno()
            process = Fork(module, *arguments, files=files, environment=plain)
            given.close()  # or writing would wait for a reader that has ended
            with contextlib.suppress(BrokenPipeError):
                giving.write(text)
        try:
            code = process.wait(120)
        finally:
            process.kill()
        told = content(out), content(err)
    assert "Traceback" not in told[1]
    return code, *told


def content(stream: IO[bytes]) -> str:
    """Return all that was written to a file."""
    stream.seek(0)
    return stream.read().decode(errors="replace")


@functools.cache
def _forking() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Return the process that forks, and the socket that it takes requests from."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"], stdin=theirs, cwd=ROOT, start_new_session=True,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
    return process, ours


def stop() -> None:
    """End the process that forks, if there is one. What it forked goes on."""
    if _forking.cache_info().currsize:
        process, requests = _forking()
        _forking.cache_clear()
        # a process that a test forked may hold a copy of the socket
        requests.shutdown(socket.SHUT_RDWR)
        requests.close()
        process.wait()


# -- the process that forks ------------------------------------------------------------------------


def _prepare() -> None:
    """Import what programs import, and what they import when they open a model and serve it."""
    import edge
    from edge.apps.chat import conversation, input  # noqa: F401
    from edge.apps.serve import run  # noqa: F401
    from edge.plugins.cpu import library

    if library.path() is not None:  # else the kernels were not compiled
        with edge.load("demo-draft", engine="cpu", threads=1) as model:
            model.session()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    assert not {"onnxruntime", "torch"} & {*sys.modules}, "tests hide them from forks"
    gc.freeze()  # or each fork would copy these objects when it collects garbage


def _next_fork() -> dict[str, Any]:
    """Fork for each request; return the request in the forked process, and never in this one."""
    requests = socket.socket(fileno=0)
    running: dict[int, tuple[int, socket.socket]] = {}  # by what tells of its end
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready in running:
                pid, status = running.pop(ready)
                os.close(ready)
                _tell(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                status.close()
                continue
            message, fds, _, _ = socket.recv_fds(requests, _MOST, 4)
            if not message:
                os._exit(0)
            if not (pid := os.fork()):
                for end, (_, others) in running.items():
                    os.close(end)
                    others.close()
                requests.detach()
                return json.loads(message) | {"fds": fds[1:], "status": fds[0]}
            for file in fds[1:]:
                os.close(file)
            status = socket.socket(fileno=fds[0])
            running[os.pidfd_open(pid)] = pid, status
            _tell(status, pid)


def _tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody waits for it any more
        status.sendall(b"%d\n" % number)


def _become(asked: dict[str, Any]) -> None:
    """Go on in the forked process as `python -m MODULE` does."""
    os.close(asked["status"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    if asked["terminal"] is not None:
        os.setsid()
        asked["fds"] = [os.open(asked["terminal"], os.O_RDWR)] * 3  # it becomes the controlling one
    for number, file in enumerate(asked["fds"]):
        os.dup2(file, number)
    for file in {*asked["fds"]}:
        os.close(file)
    for number, name, mode, errors in _STREAMS:
        lines = 1 if number == 2 or os.isatty(number) else -1
        stream = open(number, mode, lines, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    module, arguments = asked["module"], asked["arguments"]
    if module == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _prepare()
    _become(_next_fork())
