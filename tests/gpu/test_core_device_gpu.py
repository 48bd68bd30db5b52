"""CoreDevice on a real GPU: the same data flow as over the fake driver, and real faults.

Kernels are compiled for the GPU of this machine, by nvcc or, without it, by Triton.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from edge.errors import EngineError
from edge.launch import CompiledKernel, Variant
from edge.runtime.cuda.core import CoreDevice
from tests.facts import says

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 37, 300
# the same as `rows.add` for these constants
_SOURCE = """
extern "C" __global__ void add(const float *a, const float *b, float *y) {
    extern __shared__ float s[];
    int row = blockIdx.x, channel = blockIdx.y * 128 + threadIdx.x;
    if (channel >= 300) return;
    s[threadIdx.x] = a[row * 300 + channel];
    y[row * 300 + channel] = s[threadIdx.x] + b[row * 300 + channel];
}
extern "C" __global__ void forever(volatile int *never) { while (*never == 0) {} }
"""


class Add(NamedTuple):
    """y = a + b, f32 [ROWS, WIDTH], and how it was compiled."""

    variant: Variant
    compiled: CompiledKernel
    cubin: bytes
    grid: tuple[int, int, int]


@pytest.fixture(scope="module")
def device() -> CoreDevice:
    try:
        return CoreDevice(limit_s=60)
    except EngineError as error:
        pytest.skip(f"no GPU to run on: {error}")


@pytest.fixture(scope="module")
def nvcc(device: CoreDevice, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """Compile _SOURCE; None without nvcc, or if nvcc does not know this GPU."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        return None
    folder = tmp_path_factory.mktemp("nvcc")
    (folder / "k.cu").write_text(_SOURCE)
    command = [compiler, f"-arch=sm_{device.sm}", "-cubin", "-o", "k.cubin", "k.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True)
    return folder / "k.cubin" if done.returncode == 0 else None


@pytest.fixture(scope="module")
def add(device: CoreDevice, nvcc: Path | None) -> Add:
    """Compile with nvcc, using over 48 KB of dynamic shared memory to test the opt-in; otherwise
    with Triton.
    """
    plain: dict[str, Any] = {"kernel": "rows.add", "arguments": ("a", "b", "y"), "warps": 4}
    types = ("*fp32:16", "*fp32:16", "*fp32:16")
    if nvcc is not None:
        variant = Variant(types=types, constants={}, **plain)
        compiled = CompiledKernel(
            file="k.cubin", symbol="add", shared_bytes=(48 << 10) + 4096, scratch=0
        )
        return Add(variant, compiled, nvcc.read_bytes(), (ROWS, 3, 1))
    pytest.importorskip("triton", reason="neither nvcc nor Triton to compile with")
    from edge.plugins.compiler.aot import compile_variant

    strides = {"WIDTH": WIDTH, "A_STRIDE": WIDTH, "B_STRIDE": WIDTH, "BLOCK": 128}
    variant = Variant(types=types, constants=strides, **plain)
    return Add(variant, *compile_variant(variant, device.sm), (ROWS, 3, 1))


def _host(device: CoreDevice, values: np.ndarray) -> Any:
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    out = device.host(data.nbytes)
    out[:] = data
    return out


def _values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)


# -- data -----------------------------------------------------------------------------------------


def test_memory_starts_as_zeros_and_copies_come_back(device: CoreDevice) -> None:
    memory, other, out = device.allocate(1000), device.allocate(1000), device.host(1000)
    source = _host(device, np.arange(100, dtype=np.uint8))
    assert memory.address % 256 == 0
    device.write(memory, 7, source)
    device.fill(memory, 200, 300, 0xAB)
    device.copy(other, 1, memory, 0, 999)
    device.read(out, other, 0)
    device.wait()
    expected = np.zeros(1000, np.uint8)
    expected[8:108] = np.arange(100)
    expected[201:501] = 0xAB
    assert np.array_equal(out, expected)


def test_a_launch_adds(device: CoreDevice, add: Add) -> None:
    kernel = device.load(*add[:3])
    a, b = _values(1), _values(2)
    memory = [device.allocate(a.nbytes) for _ in range(3)]
    for target, values in zip(memory, (a, b), strict=False):
        device.write(target, 0, _host(device, values))
    device.launch(kernel, add.grid, [one.address for one in memory])
    out = device.host(a.nbytes)
    device.read(out, memory[2], 0)
    device.wait()
    assert np.array_equal(out.view(np.float32).reshape(a.shape), a + b)


def test_a_graph_replays_with_new_inputs(device: CoreDevice, add: Add) -> None:
    kernel = device.load(*add[:3])
    size = _values(0).nbytes
    a, b, y = (device.allocate(size) for _ in range(3))
    source, out = device.host(size), device.host(size)
    device.wait()
    with device.record() as recorded:
        device.write(a, 0, source)
        device.copy(b, 0, a, 0, size)
        device.launch(kernel, add.grid, [a.address, b.address, y.address])
        device.launch(kernel, add.grid, [y.address, b.address, y.address])
        device.read(out, y, 0)
    device.wait()
    assert not out.any()  # recording runs nothing
    for seed in range(3):
        values = _values(seed)
        source[:] = values.reshape(-1).view(np.uint8)
        recorded[0].replay()
        device.wait()
        expected = (values + values) + values
        assert np.array_equal(out.view(np.float32).reshape(values.shape), expected)


def test_a_failed_recording_leaves_the_stream_usable(device: CoreDevice) -> None:
    memory, out = device.allocate(16), device.host(16)
    with pytest.raises(KeyError), device.record():
        device.fill(memory, 0, 16, 1)
        raise KeyError
    device.read(out, memory, 0)
    device.wait()
    assert not out.any()


def test_memory_comes_back(device: CoreDevice) -> None:
    device.wait()
    free, total = device.memory()
    assert 0 < free <= total
    size = min(256 << 20, free // 4)
    for _ in range(40):
        device.allocate(size)
        device.wait()
    # other programs may allocate meanwhile
    assert free - device.memory()[0] < 20 * size


def test_more_than_there_is_is_refused_and_passes(device: CoreDevice) -> None:
    total = device.memory()[1]
    with pytest.raises(EngineError, match=f"no room for {2 * total} bytes"):
        device.allocate(2 * total)
    assert device.lost is None
    device.allocate(1024)
    device.wait()


def test_threads_take_turns(device: CoreDevice) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            device.allocate(4096)
            device.wait()
        except BaseException as error:
            errors.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not errors


def test_a_stream_of_pytorch_is_used(device: CoreDevice, add: Add) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    stream = torch.cuda.Stream()
    mine = CoreDevice(stream=stream)
    kernel = mine.load(*add[:3])
    with torch.cuda.stream(stream):
        a = torch.ones(ROWS, WIDTH, device="cuda") * 2
        y = torch.empty_like(a)
        mine.launch(kernel, add.grid, [a.data_ptr(), a.data_ptr(), y.data_ptr()])
        assert mine.borrow(a.data_ptr(), a.nbytes, a).nbytes == a.nbytes
        total = float(y.sum())
    assert total == 4 * ROWS * WIDTH
    with pytest.raises(EngineError, match="default stream"):
        CoreDevice(stream=torch.cuda.default_stream())


# -- faults, each in a process of its own ---------------------------------------------------------

_PRELUDE = """
import sys
from edge.errors import EngineError
from edge.launch import CompiledKernel, Variant
from edge.runtime.cuda.core import CoreDevice

def said(attempt):
    try:
        attempt()
    except EngineError as error:
        return str(error)
    return "nothing was raised"

def load(symbol, arguments, types):
    variant = Variant(kernel="rows.add", arguments=arguments, types=types, constants={})
    compiled = CompiledKernel(file="k.cubin", symbol=symbol, shared_bytes=1024, scratch=0)
    return device.load(variant, compiled, open(sys.argv[1], "rb").read())
"""


def _process(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PRELUDE + textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # destructors print nothing
    return done.stdout


def test_an_illegal_address_takes_the_device_not_the_process(nvcc: Path | None) -> None:
    if nvcc is None:
        pytest.skip("written for nvcc's kernel")
    out = _process(
        """
        device = CoreDevice()
        memory = device.allocate(64)
        kernel = load("add", ("a", "b", "y"), ("*fp32",) * 3)
        device.launch(kernel, (1, 1, 1), [memory.address, memory.address, 1 << 46])
        print(said(device.wait))
        print(said(lambda: device.allocate(4)))
        del memory, kernel
        """,
        str(nvcc),
    )
    first, second = out.splitlines()
    assert first.startswith("running on the GPU failed: CUDA_ERROR_ILLEGAL_ADDRESS")
    assert second.startswith("the device is lost: CUDA_ERROR_ILLEGAL_ADDRESS")


def test_a_kernel_that_never_ends_is_given_up(nvcc: Path | None) -> None:
    if nvcc is None:
        pytest.skip("written for nvcc's kernel")
    out = _process(
        """
        import os
        device = CoreDevice(limit_s=1.0)
        memory = device.allocate(64)
        kernel = load("forever", ("never",), ("*i32",))
        device.launch(kernel, (1, 1, 1), [memory.address])
        print(said(device.wait), flush=True)
        del memory, kernel
        print("alive", flush=True)
        os._exit(0)  # what the driver does at the end is not looked at here
        """,
        str(nvcc),
    )
    first, second = out.splitlines()
    assert "1 s" in first and "the device is lost" in first
    assert second == "alive"


def test_a_forked_child_is_told(device: CoreDevice) -> None:
    out = _process(
        """
        import os
        device = CoreDevice()
        memory = device.allocate(64)
        if os.fork() == 0:
            print(said(device.wait), flush=True)
            del memory, device
            os._exit(0)
        os.wait()
        device.wait()
        print("parent", flush=True)
        """
    )
    child, parent = out.splitlines()
    assert says(child, "lost: ", "fork", "start a new process") and parent == "parent"
