"""A few of a GPU's multiprocessors: a green context, which stands in for a smaller GPU.

Its memory and caches stay whole, so it says how work spreads over few multiprocessors, and nothing
of what a small GPU's memory would do.
"""

from __future__ import annotations

from typing import Any

from edge.errors import EngineError
from edge.runtime.cuda.core import CoreDevice


def part_of_gpu(multiprocessors: int) -> CoreDevice:
    """A device whose stream runs on at least so many multiprocessors (the driver rounds up).

    Raises EngineError: no driver, no green contexts, more than there are.
    """
    from cuda.bindings import driver

    def done(answer: Any) -> Any:
        error, *values = answer
        if error != driver.CUresult.CUDA_SUCCESS:
            raise EngineError(
                f"no green context of {multiprocessors} multiprocessors: {error.name}",
                field="multiprocessors",
            )
        return values[0] if values else None

    done(driver.cuInit(0))
    gpu = done(driver.cuDeviceGet(0))
    # a primary context must exist before parts of the GPU can be taken from it
    primary = done(driver.cuDevicePrimaryCtxRetain(gpu))
    done(driver.cuCtxSetCurrent(primary))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = done(driver.cuDeviceGetDevResource(gpu, kind))
    parts = done(driver.cuDevSmResourceSplitByCount(1, whole, 0, multiprocessors))
    described = done(driver.cuDevResourceGenerateDesc([parts[0]], 1))
    flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = done(driver.cuGreenCtxCreate(described, gpu, flag))
    done(driver.cuCtxSetCurrent(done(driver.cuCtxFromGreenCtx(green))))
    plain = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = done(driver.cuGreenCtxStreamCreate(green, plain, 0))
    device = CoreDevice(stream=int(stream))
    # the driver tells of the whole GPU; kernels are spread over what this stream has
    device.multiprocessors = int(parts[0].sm.smCount)
    return device
