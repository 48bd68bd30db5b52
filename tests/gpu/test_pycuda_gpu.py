"""PyCUDA's own context, stream and allocation under the CUDA engine's device, on a real GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edge.runtime.cuda.core import CoreDevice

pytestmark = pytest.mark.gpu


@pytest.fixture
def driver() -> Iterator[Any]:
    """Return `pycuda.driver` with its own context, current on this thread."""
    driver = pytest.importorskip(
        "pycuda.driver", reason="pip install 'mamba-edge[pycuda]', on a GPU", exc_type=ImportError
    )
    driver.init()
    context = driver.Device(0).make_context()
    try:
        yield driver
    finally:
        context.pop()
        context.detach()


def test_a_context_that_is_current_is_used(driver: Any) -> None:
    device = CoreDevice()
    memory = device.allocate(64)
    device.fill(memory, 0, 64, 3)
    device.wait()
    # the same context: PyCUDA reads what the device wrote
    back = np.zeros(64, np.uint8)
    driver.memcpy_dtoh(back, memory.address)
    assert (back == 3).all()


def test_a_stream_and_an_allocation_are_used(driver: Any) -> None:
    stream, allocation = driver.Stream(), driver.mem_alloc(256)
    device = CoreDevice(stream=stream)
    memory = device.borrow(int(allocation), 256, allocation)
    device.fill(memory, 0, 256, 7)
    back = driver.pagelocked_empty(256, np.uint8)
    # after the fill, in the user's own stream
    driver.memcpy_dtoh_async(back, allocation, stream)
    stream.synchronize()
    assert (back == 7).all()
