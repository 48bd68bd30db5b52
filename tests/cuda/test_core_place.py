"""CoreDevice's placement: GPUs, the user's contexts and streams, and missing parts.

Over the real cuda-core on a fake driver: see `fake_driver`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError
from edge.launch import Variant
from tests.cuda.fake_driver import error_of, kernel, open_device, ran, scenario
from tests.facts import says

pytestmark = pytest.mark.without_gpu


def _works(device: Any) -> list[int]:
    """Check a launch between two copies, replayed."""
    memory, host = device.allocate(8), device.host(8)
    host.view(np.int32)[:] = 5
    loaded = device.load(*kernel("add_one", ("*i32", "i32")))
    with device.record() as recorded:
        device.write(memory, 0, host)
        device.launch(loaded, (1, 1, 1), [memory.address, 1])
        device.read(host, memory, 0)
    recorded[0].replay()
    device.wait()
    return host.view(np.int32).tolist()


def _current() -> int:
    from cuda.bindings import driver

    return int(driver.cuCtxGetCurrent()[1])


def _user_stream() -> Any:
    """Return a stream of its own context, as PyCUDA makes them; the context is not current."""
    from cuda.bindings import driver

    driver.cuInit(0)
    parameters = [driver.CUctxCreateParams()] if driver.CUDA_VERSION >= 13000 else []
    context = driver.cuCtxCreate(*parameters, 0, driver.CUdevice(0))[1]
    stream = driver.cuStreamCreate(1)[1]
    driver.cuCtxPopCurrent()
    return driver, context, stream


# -- GPUs -----------------------------------------------------------------------------------------


@scenario(devices=3, sm=120)
def several() -> Any:
    devices = [open_device(), open_device(2)]
    absent = [error_of(lambda: open_device(3)), error_of(lambda: open_device(-1))]
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2"
    absent.append(error_of(lambda: open_device(3)))
    return {
        "names": [device.name for device in devices],
        "sm": devices[1].sm,
        "absent": absent,
        "works": [_works(device) for device in reversed(devices)],
    }


def test_a_gpu_is_chosen_by_its_number() -> None:
    done = ran(several).result
    assert done["names"] == ["GPU 0 (Fake 0)", "GPU 2 (Fake 2)"]
    assert done["sm"] == 120
    assert done["works"] == [[6, 5], [6, 5]]
    assert done["absent"][:2] == [
        "device: unknown GPU 3: 3 are visible",
        "device: unknown GPU -1: 3 are visible",
    ]
    assert done["absent"][2].endswith("(CUDA_VISIBLE_DEVICES=0,1,2)")


@scenario(devices=0)
def no_gpu() -> Any:
    return error_of(open_device)


def test_a_driver_without_a_gpu_is_told() -> None:
    assert "CUDA_ERROR_NO_DEVICE" in ran(no_gpu).result
    assert "CUDA_VISIBLE_DEVICES" in ran(no_gpu).result


# -- contexts -------------------------------------------------------------------------------------


@scenario(devices=2)
def contexts() -> Any:
    driver, context, _ = _user_stream()
    driver.cuCtxPushCurrent(context)
    device = open_device()
    same = int(device.place.context) == int(context)
    works = _works(device)
    kept = _current() == int(context)
    # for another GPU its primary context is used, and the user's stays current
    other = open_device(1)
    elsewhere = [_works(other), int(other.place.context) != int(context)]
    return {"same": same, "works": works, "kept": [kept, _current() == int(context)],
            "elsewhere": elsewhere}  # fmt: skip


def test_a_context_that_is_current_is_used_and_stays_current() -> None:
    done = ran(contexts)
    assert done.result == {
        "same": True, "works": [6, 5], "kept": [True, True], "elsewhere": [[6, 5], True],
    }  # fmt: skip
    assert not done.lines("failed ")


@scenario()
def left_alone() -> Any:
    driver, context, _ = _user_stream()
    device = open_device()  # no context is current, so the primary one is used
    driver.cuCtxPushCurrent(context)
    works = _works(device)
    held = device.allocate(16)
    device.wait()
    del held
    return {"works": works, "still": _current() == int(context),
            "primary": int(device.place.context) != int(context)}  # fmt: skip


def test_another_context_made_current_later_does_not_matter() -> None:
    done = ran(left_alone)
    assert done.result == {"works": [6, 5], "still": True, "primary": True}
    assert done.live["memory"] == done.live["host"] == 0
    assert done.live["streams"] == 1  # the user's


@scenario()
def destroyed() -> Any:
    driver, context, _ = _user_stream()
    driver.cuCtxPushCurrent(context)
    device = open_device()
    memory = device.allocate(16)
    driver.cuCtxDestroy(context)
    text = error_of(device.wait)
    del memory, device
    return text


def test_a_context_its_owner_destroyed_takes_the_device() -> None:
    done = ran(destroyed)
    assert "CUDA_ERROR_CONTEXT_IS_DESTROYED" in done.result
    assert done.stderr == ""


# -- streams --------------------------------------------------------------------------------------


class _Protocol:
    def __init__(self, number: int) -> None:
        self.number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.number


class _Property(_Protocol):
    @property
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.number


class _PyCuda:
    def __init__(self, number: int) -> None:
        self.handle = number


class _Torch:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number


@scenario()
def streams() -> Any:
    import cuda.core

    _, context, stream = _user_stream()
    number = int(stream)
    forms = [number, _Protocol(number), _Property(number), _PyCuda(number), _Torch(number),
             cuda.core.Stream.from_handle(number)]  # fmt: skip
    out = []
    for form in forms:
        device = open_device(stream=form)
        out.append([_works(device), int(device.place.context) == int(context)])
        del device
    return out


def test_a_users_stream_is_used_in_its_own_context_and_left_alone() -> None:
    done = ran(streams)
    assert done.result == [[[6, 5], True]] * 6
    assert not done.lines("failed ")
    assert done.live["streams"] == 1 and done.live["memory"] == 0


@scenario()
def ordered() -> Any:
    driver, _, stream = _user_stream()
    device = open_device(stream=int(stream))
    memory, host = device.allocate(16), device.host(16)
    # the user's own work, before and between the device's
    driver.cuMemsetD8Async(memory.address, 3, 16, stream)
    device.fill(memory, 4, 4, 9)
    driver.cuMemsetD8Async(memory.address, 1, 2, stream)
    device.read(host, memory, 0)
    device.wait()
    return host.tolist()


def test_work_of_the_user_on_the_stream_keeps_its_place() -> None:
    assert ran(ordered).result == [1, 1, 3, 3, 9, 9, 9, 9] + [3] * 8


@scenario(devices=2)
def refused_streams() -> Any:
    _, _, stream = _user_stream()

    class Newer(_Protocol):
        def __cuda_stream__(self) -> tuple[int, int]:
            return 7, self.number

    attempts = [0, 1, 2, True, "stream", Newer(int(stream))]
    out = [error_of(lambda one=one: open_device(stream=one)) for one in attempts]
    return [*out, error_of(lambda: open_device(1, int(stream)))]


def test_a_stream_that_cannot_be_recorded_is_refused() -> None:
    *rest, version, other = ran(refused_streams).result
    assert all(text.startswith("stream: is the default stream, ") for text in rest[:3])
    assert says(rest[3], "stream: ", "bool")
    assert says(rest[4], "stream: ", "str")
    assert version.startswith("stream: ") and "version 7" in version
    assert other.startswith("stream: ") and "GPU 0" in other


# -- the user's memory ----------------------------------------------------------------------------


@scenario(devices=2)
def borrowed() -> Any:
    from cuda.bindings import driver

    device, other = open_device(), open_device(1)
    foreign = other.allocate(64)
    driver.cuDevicePrimaryCtxRetain(driver.CUdevice(0))
    pointer = int(driver.cuMemAlloc(1024)[1])
    user = device.borrow(pointer, 512, owner="its owner")
    host = device.host(512)
    device.fill(user, 0, 512, 6)
    device.read(host, user, 0)
    device.wait()
    errors = [
        error_of(lambda: device.borrow(pointer, 1025)),
        error_of(lambda: device.borrow(pointer + 8, 16)),
        error_of(lambda: device.borrow(foreign.address, 64)),
        error_of(lambda: device.borrow(host.ctypes.data, 64)),
        error_of(lambda: device.borrow(12345, 64)),
    ]
    del user
    device.wait()
    return {"bytes": set(host.tolist()) == {6}, "errors": errors, "pointer": pointer,
            "foreign": foreign.address, "host": host.ctypes.data}  # fmt: skip


def test_memory_of_the_user_is_used_and_never_freed() -> None:
    done = ran(borrowed)
    found = done.result
    assert found["bytes"]
    short, crooked, foreign, host, unknown = found["errors"]
    assert says(short, "nbytes: ", hex(found["pointer"]), 1024, 1025)
    assert says(crooked, "address: ", hex(found["pointer"] + 8), "256 bytes")
    assert says(foreign, "address: ", hex(found["foreign"]), "not memory", "GPU 0")
    assert says(host, "address: ", hex(found["host"]), "not memory", "GPU 0")
    assert "CUDA_ERROR_INVALID_VALUE" in unknown
    assert done.live["memory"] == 1  # the user's


# -- code from ptxas ------------------------------------------------------------------------------


@scenario({"sm": 87}, {"sm": 90})
def real_cubin() -> Any:
    try:
        from edge.plugins.compiler.aot import compile_variant
    except ImportError:
        return None
    variant = Variant(
        kernel="rows.gather_rows",
        arguments=("x", "rows", "y", "B"),
        types=("*fp32:16", "*i32:16", "*fp32:16", "i32"),
        constants={"WIDTH": 256, "X_STRIDE": 256, "BLOCK": 256},
    )
    compiled, cubin = compile_variant(variant, 87)
    device = open_device()
    other = variant.model_copy(update={"types": ("*fp32:16", "*i32:16", "*fp32:16", "i64")})
    try:
        loaded = device.load(variant, compiled, cubin)
    except EngineError as error:
        return {"error": str(error)}
    device.launch(loaded, (3, 1, 1), [256, 512, 768, 2])
    device.wait()
    wrong = error_of(lambda: device.load(other, compiled, cubin))
    return {"scratch": compiled.scratch, "symbol": compiled.symbol, "wrong": wrong}


def test_a_cubin_of_triton_is_launched_with_the_parameters_it_has() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = ran(real_cubin, sm=87)
    (line,) = done.lines("run ")
    assert line.startswith(f"run {done.result['symbol']} grid=3,1,1 block=128,1,1 ")
    nulls = ["0" * 16] * done.result["scratch"]
    pointers = [f"{value:#018x}"[2:] for value in (256, 512, 768)]
    little = [bytes.fromhex(text)[::-1].hex() for text in pointers]
    assert line.split("arguments= ")[1].split(",") == [*little, "02000000", *nulls]
    assert "its variant says" in done.result["wrong"]


def test_a_cubin_for_another_gpu_is_refused() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    error = ran(real_cubin, sm=90).result["error"]
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in error and "edge export --target" in error


# -- missing parts --------------------------------------------------------------------------------


@scenario({"version": 12060}, {"version": 13020})
def bindings_and_driver() -> Any:
    return error_of(open_device)


def test_bindings_newer_than_the_driver_come_with_what_to_install() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    if driver.CUDA_VERSION // 1000 != 13:
        pytest.skip("written for cuda-bindings 13")
    install = '(pip install "mamba-edge[cuda]" "cuda-bindings>=12,<13")'
    assert says(ran(bindings_and_driver, version=12060).result, "12.6", install)
    assert ran(bindings_and_driver, version=13020).result == "nothing was raised"


@scenario(version=13000)
def without_cuda_core() -> Any:
    for name in [name for name in sys.modules if name == "cuda" or name.startswith("cuda.")]:
        del sys.modules[name]
    sys.modules["cuda.core"] = None  # type: ignore[assignment]  # as if it were not installed
    return error_of(open_device)


def test_without_cuda_core_the_install_line_is_for_the_driver() -> None:
    text = ran(without_cuda_core).result
    assert text.startswith("cuda-core cannot be imported")
    assert text.endswith('(pip install "mamba-edge[cuda]" "cuda-bindings>=13,<14")')


def test_without_a_driver_there_is_a_remedy_and_importing_is_light() -> None:
    script = (
        "import sys, edge.runtime.cuda.core as core\n"
        "heavy = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not heavy & {'cuda', 'torch', 'triton', 'onnx'}, heavy\n"
        "try: core.CoreDevice()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert done.stdout.startswith("EngineError no NVIDIA driver was found")
        assert "leave --engine out" in done.stdout
