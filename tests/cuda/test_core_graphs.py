"""Recorded graphs of CoreDevice over the real cuda-core on a fake driver: see `fake_driver`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cuda.fake_driver import host_of, kernel, open_device, ran, scenario

pytestmark = pytest.mark.without_gpu


@scenario()
def graphs() -> Any:
    device = open_device()
    memory, source, out = device.allocate(16), device.host(16), device.host(16)
    loaded = device.load(*kernel("add_one", ("*i32", "i32")))
    device.wait()
    with device.record() as recorded:
        device.write(memory, 0, source)
        device.launch(loaded, (1, 1, 1), [memory.address, 4])
        device.launch(loaded, (1, 1, 1), [memory.address, 2])
        device.read(out, memory, 0)
    (graph,) = recorded
    device.wait()
    seen = [out.view(np.int32).tolist()]
    for start in (10, 20):
        source.view(np.int32)[:] = start
        graph.replay()
        device.wait()
        seen.append(out.view(np.int32).tolist())
    return seen


def test_a_recorded_graph_runs_when_replayed_and_reads_its_inputs_then() -> None:
    done = ran(graphs)
    assert done.result == [[0] * 4, [12, 12, 11, 11], [22, 22, 21, 21]]
    # a replay is one launch, and recording runs nothing
    assert len(done.lines("replay")) == 2
    assert len(done.lines("run add_one")) == 4
    assert not any(count for name, count in done.live.items() if name != "libraries")


@scenario()
def kept_by_graph() -> Any:
    device = open_device()
    out = device.host(4)

    def record() -> Any:
        memory = device.allocate(4)
        source = host_of(device, np.array([41], np.int32))
        loaded = device.load(*kernel("add_one", ("*i32", "i32")))
        with device.record() as recorded:
            device.write(memory, 0, source)
            device.launch(loaded, (1, 1, 1), [memory.address, 1])
            device.read(out, memory, 0)
        return recorded[0]

    graph = record()
    graph.replay()
    device.wait()
    return out.view(np.int32).tolist()


def test_a_graph_keeps_the_memory_of_its_copies() -> None:
    done = ran(kept_by_graph)
    assert done.result == [42]
    assert done.live["memory"] == done.live["host"] == done.live["execs"] == 0


@scenario()
def refused_in_recording() -> Any:
    from edge.errors import EngineError

    device = open_device()
    memory = device.allocate(16)
    with device.record() as earlier:
        pass
    out = {}
    with device.record() as recorded:
        attempts = {
            "allocate": lambda: device.allocate(4),
            "host": lambda: device.host(4),
            "wait": device.wait,
            "load": lambda: device.load(*kernel("add_one", ("*i32", "i32"))),
            "record": lambda: device.record().__enter__(),
            "replay": earlier[0].replay,
        }
        for name, attempt in attempts.items():
            try:
                attempt()
            except EngineError as error:
                out[name] = str(error)
        device.fill(memory, 0, 4, 1)
    before = recorded[0].kept
    # an exception inside discards the recording and leaves the device usable
    try:
        with device.record() as failed:
            device.fill(memory, 0, 16, 9)
            raise KeyError("inside")
    except KeyError:
        pass
    host = device.host(16)
    device.read(host, memory, 0)
    device.wait()
    return {"refused": out, "failed": len(failed), "bytes": host.tolist(), "kept": len(before)}


def test_recording_refuses_what_cannot_be_recorded() -> None:
    done = ran(refused_in_recording)
    refused = done.result["refused"]
    assert set(refused) == {"allocate", "host", "wait", "load", "record", "replay"}
    assert all("while a graph is recorded" in text for text in refused.values())
    assert done.result["failed"] == 0 and done.result["kept"] == 1
    assert done.result["bytes"] == [0] * 16
    assert done.live["graphs"] == done.live["execs"] == done.live["memory"] == 0


@scenario()
def dropped_while_recording() -> Any:
    device = open_device()
    memory, other = device.allocate(16), device.allocate(16)
    device.wait()
    with device.record():
        del other  # freed after the recording
        device.fill(memory, 0, 4, 1)
    device.wait()


def test_memory_dropped_while_recording_is_freed_afterwards() -> None:
    done = ran(dropped_while_recording)
    assert not done.lines("failed ")
    assert done.live["memory"] == 0


def _timed(replays: list[float], *, latency: float) -> list[list[float]]:
    """Return the sleeps of `wait` after replays of one graph that take `latency`; the host is busy
    for a given time before each wait.
    """
    from edge.runtime.cuda import core, install

    clock, slept = [0.0], [0.0]
    device = open_device(limit_s=None)
    memory = device.allocate(16)
    device.wait()
    with device.record() as recorded:
        device.fill(memory, 0, 16, 1)
    (graph,) = recorded

    class Time:
        @staticmethod
        def monotonic() -> float:
            return clock[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            slept[0] += seconds
            clock[0] += seconds

    api = install.load().api
    done, not_ready = api.cuStreamQuery, (api.CUresult.CUDA_ERROR_NOT_READY,)
    ends = [0.0]

    def query(handle: Any) -> Any:
        clock[0] += 1e-4
        return done(handle) if clock[0] >= ends[0] else not_ready

    core.time, api.cuStreamQuery = Time, query  # type: ignore[assignment]
    found = []
    for busy in replays:
        graph.replay()
        ends[0], slept[0] = clock[0] + latency, 0.0
        clock[0] += busy
        device.wait()
        found.append([slept[0], clock[0] - ends[0]])
    device.wait()  # nothing was replayed, so it does not sleep
    return found


@scenario()
def steady() -> Any:
    return _timed([0.0] * 4, latency=0.04)


@scenario()
def after_a_stop() -> Any:
    """The process is suspended for half a minute in the second step."""
    return _timed([0.0, 30.0, *[0.0] * 20], latency=0.003)


def test_wait_sleeps_until_shortly_before_the_graph_was_done_last_time() -> None:
    first, *later = ran(steady).result
    assert first[0] == 0
    for slept, late in later:
        assert 0.037 < slept < 0.0396 and late < 1e-3


def test_a_step_that_took_long_once_is_forgotten_soon() -> None:
    """It oversleeps by at most a tenth of a second, and halves its estimate at each step."""
    late = [late for _, late in ran(after_a_stop).result[2:]]
    assert max(late) <= 0.1
    assert all(each < 1e-3 for each in late[16:])
