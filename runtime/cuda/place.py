"""Choice of GPU, context and stream for a device.

Supported contexts: the primary context (used by the CUDA runtime, PyTorch and cuda-core), a context
that the thread already made current (PyCUDA's `make_context`), and the context of the user's
stream. A foreign context or stream is never replaced or destroyed; it must outlive the device.
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
    """The chosen GPU, context and stream.

    Attributes:
        ordinal: index of the GPU among those visible under CUDA_VISIBLE_DEVICES.
        context: CUcontext.
        handle: CUstream.
        stream: cuda-core's Stream for `handle`.
        owner: the user's object that keeps the stream alive; None for a stream created here.
    """

    ordinal: int
    context: Any
    handle: Any
    stream: Any
    owner: object | None


def choose(
    modules: Modules, faults: DriverFaults, device: int | None, stream: object | None
) -> GpuStream:
    """Choose GPU, context and stream. A current context stays current. Raises EngineError."""
    api = modules.api
    with faults.of("starting CUDA"):
        faults.check(api.cuInit(0), "starting CUDA")
        count = int(faults.check(api.cuDeviceGetCount(), "counting GPUs"))
    if device is not None and not 0 <= device < count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise EngineError(f"unknown GPU {device}: {count} are visible{hidden}", field="device")
    with faults.of("choosing a GPU"):
        previous = faults.check(api.cuCtxGetCurrent(), "querying the current context")
        try:
            if stream is not None:
                return _wrap_stream(modules, faults, device, stream)
            return _create_stream(modules, faults, device, previous)
        finally:
            if int(previous):
                api.cuCtxSetCurrent(previous)


def _create_stream(
    modules: Modules, faults: DriverFaults, device: int | None, context: Any
) -> GpuStream:
    """Create a stream in the current context, or in the GPU's primary context without one or where
    `device` names another GPU.
    """
    core, api = modules
    ordinal = None
    if int(context):
        ordinal = int(faults.check(api.cuCtxGetDevice(), "querying the current GPU"))
    if ordinal is None or (device is not None and ordinal != device):
        ordinal = device or 0
        doing = f"retaining the context of GPU {ordinal}"
        core.Device(ordinal).set_current()
        # never released: cuda-core releases it at process exit, and doing so here would wait for a
        # kernel that never ends
        context = faults.check(api.cuDevicePrimaryCtxRetain(api.CUdevice(ordinal)), doing)
    handle = faults.check(api.cuStreamCreate(_NONBLOCKING), "creating a stream")
    return GpuStream(ordinal, context, handle, core.Stream.from_handle(int(handle)), None)


def _wrap_stream(
    modules: Modules, faults: DriverFaults, device: int | None, stream: object
) -> GpuStream:
    core, api = modules
    number = _stream_address(stream)
    if number in _DEFAULT_STREAMS:
        raise EngineError(
            "is the default stream, which cannot be recorded into a graph",
            field="stream",
            remedy="give one of your own, such as torch.cuda.Stream() or Device.create_stream()",
        )
    handle = api.CUstream(number)
    context = _unwrap_context(
        faults.check(api.cuStreamGetCtx(handle), "querying the stream's context")
    )
    faults.check(api.cuCtxSetCurrent(context), "entering the stream's context")
    ordinal = int(faults.check(api.cuCtxGetDevice(), "querying the stream's GPU"))
    if device is not None and device != ordinal:
        raise EngineError(f"belongs to GPU {ordinal}, not to GPU {device}", field="stream")
    return GpuStream(ordinal, context, handle, core.Stream.from_handle(number), stream)


def _unwrap_context(value: Any) -> Any:
    """Unwrap the context: some bindings return (context, green context) from cuStreamGetCtx."""
    return value[0] if isinstance(value, tuple | list) else value


def _stream_address(stream: object) -> int:
    """Return the stream's address, whichever library made it."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, number = protocol() if callable(protocol) else protocol
        if version != 0:
            raise EngineError(
                f"has version {version} of __cuda_stream__, not version 0", field="stream"
            )
        return int(number)
    # PyTorch's attribute, then PyCUDA's
    for name in ("cuda_stream", "handle"):
        number = getattr(stream, name, None)
        if isinstance(number, int):
            return number
    raise EngineError(
        f"a {type(stream).__name__} is not a CUDA stream",
        field="stream",
        remedy="give an object with __cuda_stream__, a PyCUDA stream, or its address",
    )
