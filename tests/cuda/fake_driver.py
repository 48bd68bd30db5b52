"""Run functions in a process whose CUDA driver is the fake one of `tests/fake_cuda`.

The real cuda-core and cuda-bindings run on top of it, so the tests check how they and the driver
are used: order, arguments, lifetimes, errors. They say nothing about a GPU; `tests/gpu` does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

from edge.errors import EngineError
from edge.launch import CompiledKernel, Variant
from tests.compiling import compiled

_SOURCES = Path(__file__).parents[1] / "fake_cuda"
_ROOT = Path(__file__).parents[2]
_PROCESS = Path(__file__).with_name("fake_process.py")

_Scenario = TypeVar("_Scenario", bound=Callable[[], Any])

# kernels that the fake driver implements: name, static shared bytes, parameter sizes
CUBIN = (
    b"FAKE CUBIN\nadd_one 0 8 4\naxpy 0 8 8 4 8 8 8\nforever 0\nfails 0\nmisaligned 0\n"
    b"recorded 16 8 4 8 4 8 1\n\0"
)


def open_device(*arguments: Any, **options: Any) -> Any:
    """Return a CoreDevice, inside a scenario."""
    from edge.runtime.cuda.core import CoreDevice

    return CoreDevice(*arguments, **options)


def host_of(device: Any, values: Any) -> Any:
    """Return page-locked memory with these values."""
    data = np.ascontiguousarray(values).view(np.uint8)
    out = device.host(data.nbytes)
    out[:] = data
    return out


def error_of(attempt: Callable[[], Any]) -> str:
    """Return the error that an attempt raises."""
    try:
        attempt()
    except EngineError as error:
        return str(error)
    return "nothing was raised"


class Run(NamedTuple):
    """The result of a scenario, and what the driver logged.

    Attributes:
        ended: whether it returned; otherwise stderr has the traceback.
        log: lines of `fake.h`'s FAKE_CUDA_LOG.
    """

    ended: bool
    result: Any
    log: list[str]
    stderr: str

    def lines(self, start: str) -> list[str]:
        return [line for line in self.log if line.startswith(start)]

    @property
    def live(self) -> Counter[str]:
        """Return the resources that were never released, by kind."""
        pairs = (part.partition("=") for line in self.lines("live ") for part in line.split()[1:])
        return Counter({kind: int(count) for kind, _, count in pairs})


_cases: dict[str, list[tuple[str, dict[str, object]]]] = {}


def scenario(*several: dict[str, object], **settings: object) -> Callable[[_Scenario], _Scenario]:
    """Mark a function to run in the fake process. `settings` are the driver's, without
    `FAKE_CUDA_`.

    With `several` it runs once with each.
    """

    def mark(function: _Scenario) -> _Scenario:
        cases = _cases.setdefault(function.__module__, [])
        cases.extend((function.__name__, one) for one in several or [settings])
        return function

    return mark


def ran(function: _Scenario, **settings: object) -> Run:
    """Return the result of a scenario with one of its settings, by default the first.

    All scenarios of a file run together.
    """
    module = sys.modules[function.__module__]
    found = [
        run
        for (name, given), run in zip(_cases[module.__name__], _all(module), strict=True)
        if name == function.__name__ and settings in (given, {})
    ]
    assert found, f"{function.__name__} was not to be run with {settings}"
    assert found[0].ended, found[0].stderr
    return found[0]


@cache
def _all(module: ModuleType) -> list[Run]:
    """Run every scenario of a file, each from a fresh start."""
    for name in ("cuda.core", "cuda.bindings.driver"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    folder = driver().parent
    # PYTHONPATH for cuda-core and FAKE_CUDA_VERSION allow trying other versions
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_ROOT)]))
    kept = ("FAKE_CUDA_VERSION",)
    plain = {k: v for k, v in os.environ.items() if k in kept or not k.startswith("FAKE_CUDA")}
    with tempfile.TemporaryDirectory() as name:
        cases = []
        for number, (function, settings) in enumerate(_cases[module.__name__]):
            case = Path(name) / f"{number:03}.case"
            given = {f"FAKE_CUDA_{key.upper()}": str(value) for key, value in settings.items()}
            given["FAKE_CUDA_LOG"] = str(case.with_suffix(".log"))
            case.write_text(json.dumps([function, given]))
            cases.append(case)
        _run(
            [sys.executable, str(_PROCESS), str(module.__file__), name],
            {**plain, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": path},
        )
        return [_read(case) for case in cases]


def _run(command: list[str], environment: dict[str, str]) -> None:
    """Run until the process and all its forks end; a hanging one must not outlive the tests."""
    process = subprocess.Popen(command, env=environment, cwd=_ROOT, start_new_session=True)
    try:
        code = process.wait(timeout=120)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert code == 0, f"the process of the scenarios ended with {code}"


def _read(case: Path) -> Run:
    def text(kind: str) -> str | None:
        file = case.with_suffix(kind)
        return file.read_text() if file.exists() else None

    result = text(".result")
    return Run(
        ended=result is not None,
        result=None if result is None else json.loads(result),
        log=(text(".log") or "").splitlines(),
        stderr=text(".stderr") or "",
    )


def driver() -> Path:
    """Build the driver library. Once loaded by path it is also found by name."""
    name, sources = "libcuda.so.1", sorted(map(str, _SOURCES.glob("*.c")))
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    options.append(f"-Wl,-soname,{name}")
    return compiled(name, "gcc", *options, *sources, "-ldl", "-lpthread")


def kernel(
    name: str, types: tuple[str, ...] = (), *, shared: int = 0, scratch: int = 0, warps: int = 4
) -> tuple[Variant, CompiledKernel, bytes]:
    """Return a kernel of CUBIN in the form that `Device.load` takes."""
    arguments = tuple(f"a{i}" for i in range(len(types)))
    variant = Variant(
        kernel=f"fake.{name}", arguments=arguments, types=types, constants={}, warps=warps
    )
    compiled = CompiledKernel(
        file=f"{name}.cubin", symbol=name, shared_bytes=shared, scratch=scratch
    )
    return variant, compiled, CUBIN
