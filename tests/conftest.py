"""Setup shared by all tests."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator
from typing import Any

# before Triton's first import: kernels are then interpreted on the CPU
if os.environ.get("EDGE_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

# Tensors are tiny: a second thread only adds waiting, tenfold when other programs run. torch reads
# this when it is imported, here and in the tests' child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import pytest

from tests import compiling, forks

# A shell starts background jobs with SIGINT ignored, and children inherit that: processes that a
# test interrupts would wait forever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# in the environment of every process that the tests start
_MARK = "EDGE_TEST_RUN"
_PATIENCE_S = 60.0
_modules = 0


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    only_starts_others = config.getoption("numprocesses", None) and not is_worker
    if not only_starts_others or config.getoption("--hypothesis-profile", None):
        _prepare()
    if not is_worker:
        os.environ[_MARK] = uuid.uuid4().hex
        os.environ[compiling.FOLDER] = tempfile.mkdtemp(prefix="edge-compiled-")
        # keep test chats out of the user's history, and the user's models out of the tests
        os.environ["XDG_STATE_HOME"] = os.path.join(os.environ[compiling.FOLDER], "state")
        os.environ["EDGE_MODELS"] = os.path.join(os.environ[compiling.FOLDER], "models")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Send only what a summary needs from xdist's processes, a third of six messages a test."""
    config = session.config
    durations = config.getoption("durations", None) is not None
    if not hasattr(config, "workerinput") or durations or config.getoption("xmlpath", None):
        return
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = functools.partial(_send_needed, plugin.sendevent)


def _send_needed(send: Callable[..., None], name: str, **values: Any) -> None:
    report = values.get("data", {})
    passed_around = report.get("outcome") == "passed" and report.get("when") != "call"
    if name not in ("logstart", "logfinish") and not passed_around:
        send(name, **values)


def _prepare() -> None:
    """Import what runs tests; a process that only starts others would wait for it in vain."""
    import torch
    from hypothesis import HealthCheck, settings

    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests import quick_interpreter

        quick_interpreter.install()
    torch.set_num_threads(1)
    # A run judges a change, so it tries the same examples as the run before, whatever the load of
    # the machine. For random examples: make test ARGS="--hypothesis-profile random"
    busy: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("fixed", derandomize=True, **busy)
    settings.register_profile("random", **busy)
    settings.load_profile("fixed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze the ten thousand test objects for the garbage collector, which saves a fifth of
    collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Or extension modules would report the frozen objects as leaks. No earlier, because pytest collects
# garbage five times when it ends
atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the random numbers of each test, so that they do not depend on the tests before it.

    Freeze the objects of modules that tests imported, as after collection.
    """
    import numpy as np
    import torch

    global _modules
    if len(sys.modules) > _modules + 20:
        _modules = len(sys.modules)
        gc.freeze()
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed would look for a GPU each time


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End processes that a test left running, and fail if there are any."""
    forks.stop()
    if hasattr(session.config, "workerinput"):
        return
    shutil.rmtree(os.environ[compiling.FOLDER])
    last = time.monotonic() + _PATIENCE_S
    while (left := _left_behind()) and time.monotonic() < last:
        time.sleep(0.2)
    for process in left:
        with contextlib.suppress(psutil.Error):  # it has just ended
            print(f"\nstill running at the end: {process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _left_behind() -> list[psutil.Process]:
    """Return processes of this run, whatever their current parent."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get(_MARK) == os.environ[_MARK]
            if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # of another user, or it has just ended
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, skip the tests that do not depend on the device."""
    if os.environ.get("EDGE_TEST_DEVICE", "cpu") == "cpu":
        return
    why = "runs in the interpreter, or on a driver of the tests: EDGE_TEST_DEVICE changes nothing"
    for item in items:
        if item.get_closest_marker("without_gpu"):
            item.add_marker(pytest.mark.skip(reason=why))
