"""Other libraries on a `CoreDevice`'s stream, over the fake driver: stream and lifetimes."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError
from tests.cuda.fake_driver import kernel, open_device, ran, scenario

pytestmark = pytest.mark.without_gpu


class Foreign:
    """A foreign library's object that reports its destruction."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def __del__(self) -> None:
        self._said.append("dropped")


class Holder:
    """An object that uses `Foreign`."""


@scenario()
def stream() -> Any:
    from cuda.bindings import driver

    device = open_device()
    add_one = device.load(*kernel("add_one", ("*i32:16", "i32")))
    memory, host = device.allocate(16), device.host(16)

    def work(handle: int) -> None:
        code, context = driver.cuCtxGetCurrent()
        assert not int(code) and int(context) == int(device.place.context)
        assert handle == int(device.place.handle)
        code = driver.cuLaunchKernel(
            add_one.function, 1, 1, 1, add_one.threads, 1, 1, 0, handle, add_one.parameters, 0
        )
        assert not int(code[0])

    add_one.put([memory.address, 4])
    device.enqueue(work)
    with device.record() as graphs:
        device.enqueue(work)
        device.read(host, memory, 0)
    for _ in range(2):
        graphs[0].replay()
    device.wait()
    return host.view(np.int32).tolist()


def test_what_is_issued_runs_in_order_and_can_be_recorded() -> None:
    assert ran(stream).result == [3] * 4


@scenario()
def dropping() -> Any:
    device, said = open_device(), []  # type: ignore[var-annotated]
    holder, objects = Holder(), [Foreign(said)]
    device.keep(holder, objects)
    gc.collect()
    found = [list(said)]
    with device.record():
        device.enqueue(lambda _: None)
        del holder
        gc.collect()
        found.append(list(said))  # not while recording
    device.wait()
    found.append(list(said))
    return found


def test_objects_are_dropped_when_nothing_is_recorded_or_runs() -> None:
    assert ran(dropping).result == [[], [], ["dropped"]]


@scenario(fail="cuMemsetD8Async:1:700")
def losing() -> Any:
    device, said = open_device(), []  # type: ignore[var-annotated]
    holder = Holder()
    device.keep(holder, [Foreign(said)])
    errors = []
    for work in (lambda: device.allocate(16), lambda: device.enqueue(lambda _: None)):
        try:
            work()
        except EngineError as problem:
            errors.append(problem.message)
    del holder
    gc.collect()
    return [errors, said]


def test_objects_of_a_lost_device_are_never_destroyed() -> None:
    errors, said = ran(losing).result
    assert len(errors) == 2 and "lost" in errors[1]
    assert said == []
