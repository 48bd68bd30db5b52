"""The interpreting device detects what a GPU would let pass."""

from __future__ import annotations

import numpy as np
import pytest

from edge.errors import EngineError
from edge.launch import Variant
from edge.plugins.compiler import interpreter
from edge.plugins.compiler.interpreter import InterpretDevice
from edge.runtime.cuda.device import Device

pytestmark = pytest.mark.without_gpu


@pytest.fixture
def device() -> InterpretDevice:
    return InterpretDevice("tests.cuda")


def overrun(kind: str = "*fp32:16", **changes: object) -> Variant:
    fields = {
        "kernel": "toy_kernels.overrun", "arguments": ("x", "rows"), "types": (kind, "i32"),
        "constants": {"C": 8},
    }  # fmt: skip
    return Variant.model_validate({**fields, **changes})


def test_it_is_a_device(device: InterpretDevice) -> None:
    checked: Device = device  # for mypy, by its structure
    assert (checked.name, checked.sm) == ("Triton's interpreter", 0)


def test_copies(device: InterpretDevice) -> None:
    memory, other, host = device.allocate(100), device.allocate(40), device.host(100)
    assert memory.address % 256 == other.address % 256 == 0
    host[:] = np.arange(100)
    device.write(memory, 10, host[:50])
    device.copy(other, 1, memory, 10, 39)
    device.fill(other, 0, 1, 9)
    device.read(host[:40], other, 0)
    device.wait()
    assert host[:40].tolist() == [9, *range(39)]


def test_copies_beyond_a_buffer(device: InterpretDevice) -> None:
    memory, host = device.allocate(100), device.host(100)
    for verb in (
        lambda: device.write(memory, 1, host),
        lambda: device.read(host, memory, 1),
        lambda: device.copy(memory, 60, memory, 0, 50),
        lambda: device.fill(memory, -1, 2, 0),
    ):
        with pytest.raises(EngineError, match="outside a buffer of 100"):
            verb()
    with pytest.raises(EngineError, match="onto itself"):
        device.copy(memory, 10, memory, 0, 50)
    for wrong in (np.zeros(4, np.uint8), host[::2]):
        with pytest.raises(EngineError, match=r"host\(\)"):
            device.write(memory, 0, wrong)


def test_a_write_next_to_a_buffer_is_found_when_waiting(device: InterpretDevice) -> None:
    kernel = device.load(overrun(), None, b"")
    memory = device.allocate(3 * 32)
    device.launch(kernel, (1, 1, 1), (memory.address, 2))
    device.wait()
    device.launch(kernel, (1, 1, 1), (memory.address, 3))
    with pytest.raises(EngineError, match=r"after a buffer of 96 .* toy_kernels\.overrun"):
        device.wait()
    device.wait()
    device.launch(kernel, (1, 1, 1), (memory.address - 0, 2))
    device.wait()


def test_launches_that_a_gpu_could_not_run(device: InterpretDevice) -> None:
    memory = device.allocate(1024)
    kernel = device.load(overrun(), None, b"")
    with pytest.raises(EngineError, match="not aligned"):
        device.launch(kernel, (1, 1, 1), (memory.address + 4, 1))
    with pytest.raises(EngineError, match="points to no buffer"):
        device.launch(kernel, (1, 1, 1), (memory.address + 100_000, 1))
    with pytest.raises(EngineError, match="is empty"):
        device.launch(kernel, (1, 0, 1), (memory.address, 1))
    device.launch(device.load(overrun("*fp32"), None, b""), (1, 1, 1), (memory.address + 4, 1))
    with pytest.raises(EngineError, match="unknown kernel"):
        device.load(overrun(kernel="toy_kernels.missing"), None, b"")
    with pytest.raises(EngineError, match="unknown kernel"):
        device.load(overrun(kernel="missing.overrun"), None, b"")
    with pytest.raises(EngineError, match="but got"):
        device.load(overrun(constants={"D": 8}), None, b"")


def test_a_recording_is_run_each_time_it_is_replayed(device: InterpretDevice) -> None:
    memory, host = device.allocate(64), device.host(64)
    kernel = device.load(overrun(), None, b"")
    with device.record() as graphs:
        device.write(memory, 0, host)
        device.launch(kernel, (1, 1, 1), (memory.address, 0))
        device.read(host, memory, 0)
        with pytest.raises(EngineError, match="under way"), device.record():
            pass
    host[:] = 7
    device.wait()
    assert host.min() == 7, "nothing is run while recording"
    for _ in range(2):
        host[:] = 7
        graphs[0].replay()
        device.wait()
        assert host.tolist() == [0] * 32 + [7] * 32


def test_triton_must_be_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(interpreter.VARIABLE)
    with pytest.raises(EngineError, match="before it is imported") as caught:
        InterpretDevice()
    assert caught.value.field == "TRITON_INTERPRET"


def test_arguments_of_several_types_at_one_address(device: InterpretDevice) -> None:
    """As for the values of a run without tokens, which have no size and share one place."""
    kernel = device.load(
        overrun(
            kernel="toy_kernels.nothing", arguments=("a", "b", "c"),
            types=("*i8:16", "*fp32:16", "*i64:16"), constants={},
        ),
        None,
        b"",
    )  # fmt: skip
    memory = device.allocate(0)
    device.launch(kernel, (1, 1, 1), (memory.address,) * 3)
    device.wait()


def test_without_triton_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"needs triton and torch .*mamba-edge\[kernels\]"):
        InterpretDevice()
