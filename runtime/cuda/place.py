"""The place of a device's work: which GPU, in which context, on whose stream.

Supported: the primary context (what the CUDA runtime, PyTorch and cuda-core use), a context that
the thread already made current (PyCUDA's `make_context`), and the context of a stream that the user
gives. A context or stream that somebody else made is used, never replaced and never destroyed; it
must outlive the device.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from edge.errors import EngineError
from edge.runtime.cuda.faults import DriverFaults
from edge.runtime.cuda.install import Modules

# the NULL stream, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD
_DEFAULT_STREAMS = (0, 1, 2)
_NONBLOCKING = 1


class GpuStream(NamedTuple):
    """What was chosen.

    Attributes:
        ordinal: of the GPU among those CUDA_VISIBLE_DEVICES leaves.
        context: CUcontext.
        handle: CUstream.
        stream: cuda-core's Stream of it.
        owner: the user's object, which keeps the stream alive; None: it was made here.
    """

    ordinal: int
    context: Any
    handle: Any
    stream: Any
    owner: object | None


def choose(
    modules: Modules, faults: DriverFaults, device: int | None, stream: object | None
) -> GpuStream:
    """Choose where to work. Leaves a current context as it was. Raises EngineError."""
    api = modules.api
    with faults.of("starting CUDA"):
        faults.check(api.cuInit(0), "starting CUDA")
        count = int(faults.check(api.cuDeviceGetCount(), "counting GPUs"))
    if device is not None and not 0 <= device < count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise EngineError(f"unknown GPU {device}: {count} are visible{hidden}", field="device")
    with faults.of("choosing a GPU"):
        before = faults.check(api.cuCtxGetCurrent(), "asking for the context")
        try:
            if stream is not None:
                return _of_stream(modules, faults, device, stream)
            return _own(modules, faults, device, before)
        finally:
            if int(before):
                api.cuCtxSetCurrent(before)


def _own(modules: Modules, faults: DriverFaults, device: int | None, context: Any) -> GpuStream:
    """A stream of our own in the current context, else in the GPU's primary one."""
    core, api = modules
    ordinal = None
    if int(context):
        ordinal = int(faults.check(api.cuCtxGetDevice(), "asking for the GPU"))
    if ordinal is None or (device is not None and ordinal != device):
        ordinal = device or 0
        doing = f"taking GPU {ordinal}"
        core.Device(ordinal).set_current()
        # never released: cuda-core lets go when the process ends, which would wait for a kernel
        # that never does
        context = faults.check(api.cuDevicePrimaryCtxRetain(api.CUdevice(ordinal)), doing)
    handle = faults.check(api.cuStreamCreate(_NONBLOCKING), "creating a stream")
    return GpuStream(ordinal, context, handle, core.Stream.from_handle(int(handle)), None)


def _of_stream(
    modules: Modules, faults: DriverFaults, device: int | None, stream: object
) -> GpuStream:
    core, api = modules
    number = _number(stream)
    if number in _DEFAULT_STREAMS:
        raise EngineError(
            "is the default stream, which cannot be recorded into a graph",
            field="stream",
            remedy="give one of your own, such as torch.cuda.Stream() or Device.create_stream()",
        )
    handle = api.CUstream(number)
    context = _first(faults.check(api.cuStreamGetCtx(handle), "asking for the stream's context"))
    faults.check(api.cuCtxSetCurrent(context), "entering the stream's context")
    ordinal = int(faults.check(api.cuCtxGetDevice(), "asking for the stream's GPU"))
    if device is not None and device != ordinal:
        raise EngineError(f"is of GPU {ordinal}, not of {device}", field="stream")
    return GpuStream(ordinal, context, handle, core.Stream.from_handle(number), stream)


def _first(value: Any) -> Any:
    """cuStreamGetCtx of some bindings gives (context, green context)."""
    return value[0] if isinstance(value, tuple | list) else value


def _number(stream: object) -> int:
    """The address behind what libraries call a stream."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, number = protocol() if callable(protocol) else protocol
        if version != 0:
            raise EngineError(f"speaks version {version} of __cuda_stream__", field="stream")
        return int(number)
    # PyTorch's own name; PyCUDA's
    for name in ("cuda_stream", "handle"):
        number = getattr(stream, name, None)
        if isinstance(number, int):
            return number
    raise EngineError(
        f"a {type(stream).__name__} is not a CUDA stream",
        field="stream",
        remedy="give an object with __cuda_stream__, a PyCUDA stream, or its address",
    )
