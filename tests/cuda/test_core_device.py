"""CoreDevice over the real cuda-core on a fake driver: calls that reach the driver, and their
order.

This checks the use of the API, not that a GPU computes: see `fake_driver`.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import pytest

from tests.cuda.fake_driver import host_of, kernel, open_device, ran, scenario
from tests.facts import says

pytestmark = pytest.mark.without_gpu


LATENCIES = (0, 1, 1000)


# -- memory and copies ----------------------------------------------------------------------------


@scenario()
def copies() -> Any:
    device = open_device()
    memory, other = device.allocate(64), device.allocate(64)
    source, target = host_of(device, np.arange(32, dtype=np.uint8)), device.host(64)
    device.write(memory, 8, source)
    device.fill(memory, 40, 4, 0x7F)
    device.copy(other, 4, memory, 8, 36)
    device.read(target, other, 0)
    early = target.tolist()
    device.wait()
    return {
        "aligned": memory.address % 256 == 0 and other.address % 256 == 0,
        "early": early,
        "late": target.tolist(),
        "name": device.name,
        "sm": device.sm,
    }


def test_memory_starts_as_zeros_and_copies_are_done_in_order() -> None:
    done = ran(copies)
    expected = [0] * 4 + list(range(32)) + [0x7F] * 4 + [0] * 24
    assert done.result["late"] == expected
    # a host buffer starts as zeros, and nothing arrives before the stream is synchronized
    assert done.result["early"] == [0] * 64
    assert done.result["aligned"]
    assert (done.result["name"], done.result["sm"]) == ("GPU 0 (Fake 0)", 87)
    assert not any(count for name, count in done.live.items() if name != "libraries")


@scenario()
def slices() -> Any:
    device = open_device()
    memory, host = device.allocate(16), host_of(device, np.arange(16, dtype=np.uint8))
    device.write(memory, 2, host[4:8])
    out = device.host(20)
    device.read(out[1:17], memory, 0)
    device.wait()
    return out.tolist()


def test_slices_of_host_memory_are_copied() -> None:
    assert ran(slices).result == [0, 0, 0, 4, 5, 6, 7] + [0] * 13


@scenario()
def refused_copies() -> Any:
    from edge.errors import EngineError

    device = open_device()
    memory, host = device.allocate(16), device.host(16)
    attempts = {
        "past the end": lambda: device.write(memory, 1, host),
        "before the start": lambda: device.read(host[:4], memory, -1),
        "copy past the end": lambda: device.copy(memory, 0, memory, 8, 9),
        "overlap": lambda: device.copy(memory, 0, memory, 7, 8),
        "fill past the end": lambda: device.fill(memory, 0, 17, 0),
        "pageable": lambda: device.write(memory, 0, np.zeros(4, np.uint8)),
        "strided": lambda: device.write(memory, 0, host[::2]),
        "other type": lambda: device.write(memory, 0, host.view(np.int32)),
        "not memory": lambda: device.fill(object(), 0, 4, 0),
        "negative": lambda: device.allocate(-1),
    }
    out = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except EngineError as error:
            out[name] = str(error)
    device.wait()
    return out


def test_copies_outside_of_memory_are_refused_by_name() -> None:
    refused = ran(refused_copies).result
    assert says(refused["past the end"], "target: ", 1, 17, 16)
    assert says(refused["before the start"], "source: ", -1, 3, 16)
    assert says(refused["copy past the end"], "source: ", 8, 17, 16)
    assert says(refused["overlap"], "8 bytes", "overlapping")
    assert refused["fill past the end"].startswith("target: ")
    assert says(refused["pageable"], "source: ", "not allocated", "`host`")
    assert refused["strided"] == refused["other type"]
    assert says(refused["strided"], "source: ", "contiguous")
    assert says(refused["not memory"], "target: ", "GPU memory", "object")
    assert "-1" in refused["negative"]


@scenario()
def empties() -> Any:
    device = open_device()
    memory, host = device.allocate(0), device.host(0)
    device.write(memory, 0, host)
    device.read(host, memory, 0)
    device.fill(memory, 0, 0, 1)
    device.copy(memory, 0, memory, 0, 0)
    device.wait()
    return [memory.nbytes, host.nbytes, memory.address % 256]


def test_nothing_can_be_allocated_and_copied() -> None:
    assert ran(empties).result == [0, 0, 0]


@scenario()
def dropped_source() -> Any:
    device = open_device()
    memory, out = device.allocate(8), device.host(8)
    device.write(memory, 0, host_of(device, np.full(8, 5, np.uint8)))  # nothing holds the source
    device.read(out, memory, 0)
    device.wait()
    return out.tolist()


def test_what_a_copy_reads_lives_until_it_is_done() -> None:
    done = ran(dropped_source)
    assert done.result == [5] * 8
    assert done.live["host"] == done.live["memory"] == 0


# -- launches -------------------------------------------------------------------------------------


@scenario()
def marshalled() -> Any:
    device = open_device()
    types = ("*i8:16", "i32", "i64", "fp32", "*fp32", "i8")
    loaded = device.load(*kernel("recorded", types, warps=8))
    memory = device.allocate(64)
    device.launch(loaded, (5, 4, 3), [memory.address + 16, -2, 1 << 40, 0.1, 0, -1])
    device.wait()
    return memory.address


def test_arguments_reach_the_kernel_as_their_types_say() -> None:
    done = ran(marshalled)
    (line,) = done.lines("run recorded")
    assert " grid=5,4,3 block=256,1,1 shared=0 " in line
    found = line.split("arguments= ")[1].split(",")
    expected = [
        struct.pack("<Q", done.result + 16), struct.pack("<i", -2), struct.pack("<q", 1 << 40),
        struct.pack("<f", 0.1), struct.pack("<Q", 0), struct.pack("<b", -1),
    ]  # fmt: skip
    assert [bytes.fromhex(text) for text in found] == expected


@scenario(*({"latency": count} for count in LATENCIES))
def scratch() -> Any:
    device = open_device()
    y, x, out = device.allocate(12), device.allocate(12), device.host(12)
    device.write(x, 0, host_of(device, np.array([1, 2, 3], np.float32)))
    loaded = device.load(*kernel("axpy", ("*fp32", "*fp32", "fp32", "i64"), scratch=2))
    device.launch(loaded, (1, 1, 1), [y.address, x.address, 2.0, 3])
    device.launch(loaded, (1, 1, 1), [y.address, x.address, 0.5, 2])
    device.read(out, y, 0)
    device.wait()
    return out.view(np.float32).tolist()


def test_data_flows_through_launches_and_scratch_pointers_are_null() -> None:
    done = ran(scratch)
    assert done.result == [2.5, 5.0, 6.0]
    assert all(
        line.endswith(",0000000000000000,0000000000000000") for line in done.lines("run axpy")
    )


@scenario()
def shared_memory() -> Any:
    device = open_device()
    big = device.load(*kernel("forever", shared=100_000))
    small = device.load(*kernel("recorded", _RECORDED, shared=48 << 10))
    del big
    device.launch(small, (1, 1, 1), [0, 0, 0, 0, 0, 0])
    large = device.load(*kernel("recorded", _RECORDED, shared=101_376))
    device.launch(large, (1, 1, 1), [0, 0, 0, 0, 0, 0])
    device.wait()


_RECORDED = ("*i8", "i32", "i64", "fp32", "*fp32", "i8")


def test_shared_memory_over_48_kb_is_asked_for() -> None:
    lines = ran(shared_memory).lines("run recorded")
    assert [line.split("shared=")[1].split()[0] for line in lines] == ["49152", "101376"]


@scenario()
def loaded_again() -> Any:
    for _ in range(3):
        device = open_device()
        loaded = device.load(*kernel("add_one", ("*i32", "i32")))
        memory = device.allocate(4)
        device.launch(loaded, (1, 1, 1), [memory.address, 1])
        device.wait()


def test_the_same_code_is_loaded_once_a_process() -> None:
    done = ran(loaded_again)
    # cuda-core never unloads it
    assert done.live == {**dict.fromkeys(done.live, 0), "libraries": 1}
    assert len(done.lines("run add_one")) == 3


@scenario()
def refused_launches() -> Any:
    from edge.errors import EngineError

    device = open_device()
    types = ("*i32:16", "i32")
    loaded = device.load(*kernel("add_one", types))
    memory = device.allocate(64)
    none = device.load

    def load(*arguments: Any, **options: Any) -> Any:
        return lambda: none(*kernel(*arguments, **options))

    attempts = {
        "too few": lambda: device.launch(loaded, (1, 1, 1), [memory.address]),
        "misaligned": lambda: device.launch(loaded, (1, 1, 1), [memory.address + 8, 1]),
        "range": lambda: device.launch(loaded, (1, 1, 1), [memory.address, 1 << 31]),
        "grid": lambda: device.launch(loaded, (1, 70_000, 1), [memory.address, 1]),
        "empty grid": lambda: device.launch(loaded, (0, 1, 1), [memory.address, 1]),
        "no symbol": load("missing", types),
        "parameters": load("add_one", ("*i32", "i64")),
        "more parameters": load("add_one", types, scratch=1),
        "shared": load("add_one", types, shared=200_000),
        "type": load("add_one", ("*i32", "bf16")),
        "image": lambda: none(*kernel("add_one", types)[:2], b"no cubin at all, but long enough"),
        "not compiled": lambda: none(kernel("add_one", types)[0], None, b""),
    }
    out = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except EngineError as error:
            out[name] = str(error)
    device.launch(loaded, (1, 1, 1), [memory.address, 1])
    device.wait()  # the device survives all of this
    return out


def test_a_launch_that_cannot_be_right_is_refused_before_the_driver_sees_it() -> None:
    done = ran(refused_launches)
    refused = done.result
    assert refused["too few"].startswith("fake.add_one ")
    assert refused["misaligned"].startswith("fake.add_one.a0: ")
    assert refused["range"].startswith("fake.add_one.a1: 2147483648 ")
    assert "CUDA_ERROR_INVALID_VALUE" in refused["grid"]
    assert "(0, 1, 1)" in refused["empty grid"]
    assert "CUDA_ERROR_NOT_FOUND" in refused["no symbol"]
    assert {"[8, 4]", "[8, 8]"} <= set(re.findall(r"\[.*?\]", refused["parameters"]))
    assert "[8, 4, 8]" in refused["more parameters"]
    assert "200000" in refused["shared"] and "166912" in refused["shared"]
    assert "bf16" in refused["type"]
    assert "CUDA_ERROR_INVALID_IMAGE" in refused["image"]
    assert "sm_87" in refused["not compiled"]
    assert len(done.lines("launch ")) == 1


# -- waiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency", LATENCIES)
def test_wait_comes_back_when_the_work_is_done(latency: int) -> None:
    assert ran(scratch, latency=latency).result == [2.5, 5.0, 6.0]
