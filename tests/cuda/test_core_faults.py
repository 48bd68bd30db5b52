"""CoreDevice under driver errors, hanging kernels, forks and threads.

Over the real cuda-core on a fake driver: see `fake_driver`.
"""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError
from tests.cuda.fake_driver import error_of, kernel, open_device, ran, scenario
from tests.facts import says

pytestmark = pytest.mark.without_gpu

ADD_ONE = ("*i32", "i32")


# -- errors ---------------------------------------------------------------------------------------


# the call site of each driver call, and a plausible error code
PLACES = {
    "cuInit:1:999": "made",
    "cuDeviceGetCount:1:999": "made",
    "cuDevicePrimaryCtxRetain:1:2": "made",
    "cuStreamCreate:1:2": "made",
    "cuMemAlloc:1:2": "allocate",
    "cuMemsetD8Async:1:1": "allocate",
    "cuMemHostAlloc:1:2": "host",
    "cuMemcpyHtoDAsync:1:1": "write",
    "cuMemcpyDtoHAsync:1:1": "read",
    "cuMemcpyDtoDAsync:1:1": "copy",
    "cuLibraryLoadData:1:209": "load",
    "cuLibraryGetKernel:1:500": "load",
    "cuKernelSetAttribute:1:1": "load",
    "cuKernelGetFunction:1:209": "load",
    "cuLaunchKernel:1:701": "launch",
    "cuStreamBeginCapture:1:900": "record",
    "cuStreamEndCapture:1:901": "record",
    "cuGraphInstantiateWithParams:1:2": "record",
    "cuGraphUpload:1:2": "record",
    "cuGraphLaunch:1:2": "replay",
}


# an error of a call or of a kernel, and who notices it
LOSSES = {
    "cuMemAlloc:1:700": "allocate",
    "cuMemcpyHtoDAsync:1:714": "write",
    "cuLaunchKernel:1:719": "launch",
    "cuStreamBeginCapture:1:999": "record",
    "cuGraphLaunch:1:214": "replay",
    "cuStreamQuery:1:700": "wait",
}


@scenario(*({"fail": fail} for fail in [*PLACES, *LOSSES]))
def every_call() -> Any:
    """Make every kind of call; return where it first fails, and the state of the device then."""
    try:
        device = open_device()
    except EngineError as error:
        return {"made": str(error)}
    doing = {}

    def note(name: str, attempt: Any) -> Any:
        try:
            return attempt()
        except EngineError as error:
            doing.setdefault(name, str(error))

    def record() -> Any:
        with device.record() as recorded:
            device.fill(memory, 0, 4, 1)
        return recorded[0]

    memory = note("allocate", lambda: device.allocate(16)) or note(
        "again", lambda: device.allocate(16)
    )
    host = note("host", lambda: device.host(16))
    if memory is not None and host is not None:
        note("write", lambda: device.write(memory, 0, host))
        note("read", lambda: device.read(host, memory, 0))
        note("copy", lambda: device.copy(memory, 0, memory, 8, 8))
        loaded = note("load", lambda: device.load(*kernel("add_one", ADD_ONE, shared=60_000)))
        if loaded is not None:
            note("launch", lambda: device.launch(loaded, (1, 1, 1), [memory.address, 4]))
        graph = note("record", record)
        if graph is not None:
            note("replay", graph.replay)
    note("wait", device.wait)
    return {"errors": doing, "lost": device.lost}


@pytest.mark.parametrize("fail", PLACES)
def test_a_call_that_fails_is_named_and_takes_no_more_than_itself(fail: str) -> None:
    done = ran(every_call, fail=fail)
    where, code = PLACES[fail], int(fail.rsplit(":", 1)[1])
    errors = done.result if where == "made" else done.result["errors"]
    names = {1: "INVALID_VALUE", 2: "OUT_OF_MEMORY", 209: "NO_BINARY_FOR_GPU", 500: "NOT_FOUND",
             701: "LAUNCH_OUT_OF_RESOURCES", 900: "STREAM_CAPTURE_UNSUPPORTED",
             901: "STREAM_CAPTURE_INVALIDATED", 999: "UNKNOWN"}  # fmt: skip
    expected = "no room for 16 bytes" if fail == "cuMemAlloc:1:2" else f"CUDA_ERROR_{names[code]}"
    assert expected in errors[where]
    if where != "made":
        assert set(errors) == {where} and done.result["lost"] is None
    assert done.live["memory"] == done.live["host"] == done.live["execs"] == 0


@pytest.mark.parametrize("fail", LOSSES)
def test_an_error_that_sticks_takes_the_device_and_not_the_process(fail: str) -> None:
    done = ran(every_call, fail=fail)
    first, *later = done.result["errors"].items()
    assert first[0] == LOSSES[fail]
    assert says(first[1], "lost", "start a new process")
    assert done.result["lost"]
    for _, text in later:
        assert text.startswith("the device is lost: CUDA_ERROR_")
    # nothing is freed or destroyed; cuda-core releases the context, which is held elsewhere
    failed = [line for line in done.lines("failed ") if "cuDevicePrimaryCtxRelease" not in line]
    assert len(failed) == 1
    assert done.stderr == ""


@scenario()
def bad_kernel() -> Any:
    device = open_device()
    memory = device.allocate(16)
    loaded = device.load(*kernel("add_one", ADD_ONE))
    with device.record() as recorded:
        device.launch(loaded, (1, 1, 1), [memory.address, 5])  # one element past the end
    recorded[0].replay()  # the error shows later
    first = error_of(device.wait)
    made = error_of(open_device)
    second = [error_of(attempt) for attempt in (device.wait, recorded[0].replay, device.memory)]
    return {"first": first, "second": second, "made": made}


def test_an_illegal_address_shows_where_the_stream_is_waited_for() -> None:
    done = ran(bad_kernel)
    assert says(done.result["first"], "running on the GPU", "CUDA_ERROR_ILLEGAL_ADDRESS (")
    for text in done.result["second"]:
        assert says(text, "lost: ", "CUDA_ERROR_ILLEGAL_ADDRESS", "running on the GPU")
    # a second device of this process shares the context
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in done.result["made"]
    assert done.stderr == ""


@scenario()
def too_much() -> Any:
    device = open_device()
    held = [device.allocate(600 << 20)]
    refused = error_of(lambda: device.allocate(500 << 20))
    free, total = device.memory()
    held.clear()
    device.wait()
    held.append(device.allocate(900 << 20))
    dropped = error_of(lambda: held.clear() or held.append(device.allocate(1000 << 20)))
    return {"refused": refused, "memory": [free, total], "dropped": dropped}


def test_out_of_memory_names_sizes_and_passes() -> None:
    done = ran(too_much)
    free = (1 << 30) - (600 << 20)
    said = done.result["refused"]
    assert all(str(size) in said for size in (500 << 20, free, 1 << 30)) and "capacity" in said
    assert done.result["memory"] == [free, 1 << 30]
    # memory dropped while being zeroed counts as free when it is needed
    assert done.result["dropped"] == "nothing was raised"
    assert done.live["memory"] == 0


JETSON = {"integrated": 1, "memory": 1 << 40, "largest": 64 << 20}


@scenario(
    JETSON, {**JETSON, "pieces": 0}, {**JETSON, "fail": "cuMemCreate:3:2"},
    {**JETSON, "fail": "cuMemSetAccess:1:1"},
)  # fmt: skip
def jetson() -> Any:
    device = open_device()
    size = (100 << 20) + 12_345
    held: list[Any] = []
    refused = error_of(lambda: held.append(device.allocate(size)))
    out: dict[str, Any] = {"refused": refused, "free": device.memory()[0], "size": size}
    if held:
        host = device.host(64)
        device.fill(held[0], size - 40, 40, 7)
        device.read(host, held[0], size - 64)
        device.wait()
        out["bytes"] = host.tolist()
        held.clear()
    device.wait()
    return out


def test_a_jetson_that_refuses_large_buffers_gives_memory_in_pieces() -> None:
    done = ran(jetson)
    assert done.result["refused"] == "nothing was raised"
    # the free memory is what the system can give, not what the driver reports
    assert 0 < done.result["free"] < 1 << 40
    assert done.result["bytes"] == [0] * 24 + [7] * 40
    sizes = [int(line.split()[1]) for line in done.lines("piece ")]
    assert sizes == [32 << 20] * 3 + [6 << 20]
    assert done.live["memory"] == done.live["host"] == 0


def test_a_jetson_that_gives_no_pieces_either_is_told_apart() -> None:
    for case in ({"pieces": 0}, {"fail": "cuMemCreate:3:2"}, {"fail": "cuMemSetAccess:1:1"}):
        done = ran(jetson, **{**JETSON, **case})
        assert f"no room for {done.result['size']} bytes" in done.result["refused"]
        assert "NvMap error 12" in done.result["refused"]
        assert done.live["memory"] == 0


@scenario(fail="cuMemsetD8Async:2:12345")
def unknown_code() -> Any:
    device = open_device()
    memory = device.allocate(4)
    return [error_of(lambda: device.fill(memory, 0, 4, 1)), error_of(device.wait)]


def test_an_error_newer_than_the_bindings_is_typed_too() -> None:
    done = ran(unknown_code)
    assert "12345" in done.result[0]
    assert done.result[1] == "nothing was raised"


# -- a kernel that never ends ---------------------------------------------------------------------


@scenario()
def hangs() -> Any:
    device = open_device(limit_s=0.3)
    memory = device.allocate(64)
    loaded = device.load(*kernel("forever"))
    with device.record() as recorded:
        device.launch(loaded, (1, 1, 1), [])
    device.wait()
    recorded[0].replay()
    del memory  # freeing would wait for the kernel
    texts = [error_of(device.wait), error_of(device.wait)]
    del device, loaded, recorded
    return texts


def test_a_kernel_that_never_ends_takes_the_device_and_blocks_nobody() -> None:
    done = ran(hangs)
    first, later = done.result
    assert first.startswith("GPU 0 (Fake 0) ") and "0.3 s" in first and "`limit_s`" in first
    assert later.startswith("the device is lost: ") and "0.3 s" in later


@scenario()
def interrupted() -> Any:
    import _thread

    device = open_device(limit_s=None)
    device.launch(device.load(*kernel("forever")), (1, 1, 1), [])
    threading.Timer(0.3, _thread.interrupt_main).start()
    try:
        device.wait()
    except KeyboardInterrupt:
        # and not at process exit, which would wait for the kernel
        device.limit_s = 0.0
        error_of(device.wait)
        return "interrupted"


def test_waiting_can_be_interrupted() -> None:
    assert ran(interrupted).result == "interrupted"


# -- forks and threads ----------------------------------------------------------------------------


@scenario()
def forked() -> Any:
    device = open_device()
    memory, host = device.allocate(16), device.host(16)
    out, into = os.pipe()
    if os.fork() == 0:
        texts = [error_of(lambda: device.write(memory, 0, host)), error_of(open_device)]
        del memory, host, device
        os.write(into, "|".join(texts).encode())
        os._exit(0)
    os.wait()
    device.write(memory, 0, host)
    device.wait()
    return os.read(out, 4000).decode().split("|")


def test_a_forked_child_is_told_so_and_the_parent_goes_on() -> None:
    old, new = ran(forked).result
    assert old.startswith("the device is lost: ") and "fork" in old
    assert "CUDA_ERROR_NOT_INITIALIZED" in new and "spawn" in new


@scenario()
def turns() -> Any:
    device = open_device()
    memory = device.allocate(4)
    loaded = device.load(*kernel("add_one", ADD_ONE))
    errors = []

    def work() -> None:
        try:
            device.launch(loaded, (1, 1, 1), [memory.address, 1])
            device.wait()
        except EngineError as error:
            errors.append(str(error))

    def in_thread() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    in_thread()
    in_thread()
    with device.record():
        in_thread()  # would have been recorded
    host = device.host(4)
    device.read(host, memory, 0)
    device.wait()
    return {"errors": errors, "sum": int(host.view(np.int32)[0])}


def test_threads_take_turns_but_not_during_a_recording() -> None:
    done = ran(turns)
    assert done.result["sum"] == 2
    (error,) = done.result["errors"]
    assert "another thread" in error


@scenario()
def two_at_once() -> Any:
    from edge.runtime.cuda import core

    device = open_device(limit_s=None)
    loaded = device.load(*kernel("forever"))
    device.launch(loaded, (1, 1, 1), [])
    waiting, refused = threading.Event(), threading.Event()

    def pause(_: float) -> None:  # in the middle of a wait, which then ends
        waiting.set()
        refused.wait()
        device.limit_s = 0.0

    vars(core)["time"] = SimpleNamespace(monotonic=time.monotonic, sleep=pause)
    thread = threading.Thread(target=error_of, args=(device.wait,))
    thread.start()
    waiting.wait()
    said = error_of(lambda: device.launch(loaded, (1, 1, 1), []))
    refused.set()
    thread.join()
    return said


def test_a_second_thread_is_refused_while_the_first_waits() -> None:
    assert says(ran(two_at_once).result, "in use", "another thread")


@scenario()
def dropped_elsewhere() -> Any:
    device = open_device()
    held = [device.allocate(64), device.host(64)]
    device.wait()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    return len(held)


def test_memory_dropped_in_another_thread_is_freed() -> None:
    done = ran(dropped_elsewhere)
    assert not done.lines("failed ")
    assert done.live["memory"] == done.live["host"] == done.live["streams"] == 0
