"""GPU memory, and page-locked host memory for copies without staging."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from edge.errors import EngineError
from edge.runtime import memory
from edge.runtime.cuda.device import ALIGNMENT, Bytes
from edge.runtime.cuda.faults import DriverFaults
from edge.runtime.cuda.turns import DriverTurns

# small enough for a board with fragmented memory, large enough that a gigabyte takes 32 calls
PIECE = 32 << 20
_VIRTUAL_MEMORY_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE


class DeviceMemory:
    """Memory on the GPU; see `device.Memory`.

    Attributes:
        address: device address, as passed to kernels.
        handle: CUdeviceptr.
        nbytes: size in bytes.
        owner: the user's object that keeps borrowed memory alive; None for own memory.
    """

    __slots__ = ("__weakref__", "address", "handle", "nbytes", "owner")

    def __init__(self, handle: Any, nbytes: int, owner: object = None) -> None:
        self.handle = handle
        self.address = int(handle)
        self.nbytes = nbytes
        self.owner = owner


def allocate(turns: DriverTurns, ordinal: int, nbytes: int, integrated: bool) -> DeviceMemory:
    """Allocate `nbytes`, not zeroed. The caller holds a turn. Raises EngineError."""
    if nbytes < 0:
        raise EngineError(f"cannot allocate {nbytes} bytes", field="nbytes")
    doing = f"allocating {nbytes} bytes"
    with turns.faults.of(doing):
        code, handle = turns.api.cuMemAlloc(max(1, nbytes))
        if code == turns.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return _allocate_in_pieces(turns, ordinal, nbytes, integrated)
        turns.faults.check((code,), doing)
    allocated = DeviceMemory(handle, nbytes)
    weakref.finalize(allocated, turns.free, turns.api.cuMemFree, handle).atexit = False
    return allocated


def _allocate_in_pieces(
    turns: DriverTurns, ordinal: int, nbytes: int, integrated: bool
) -> DeviceMemory:
    """Allocate in pieces after the driver refused one block: a Jetson with enough free memory may
    still grant it that way. Raises EngineError.
    """
    free, total = available(turns, integrated)
    message = f"the GPU has no room for {nbytes} bytes: {free} of {total} are free"
    if not integrated or free <= nbytes:
        raise EngineError(
            message, remedy="use a smaller model, window or capacity, or stop other programs"
        )
    refusal = EngineError(
        f"{message}, but the driver refused",
        remedy="L4T 36.4.7 refuses large allocations with NvMap error 12: update to L4T "
        "36.5, or restart the board if its memory is fragmented",
    )
    if not _can_map(turns.api, turns.faults, ordinal):
        raise refusal
    try:
        mapped = _reserve(turns.api, turns.faults, ordinal, nbytes)
    except EngineError as problem:
        raise refusal from problem
    allocated = DeviceMemory(mapped.address, nbytes)
    weakref.finalize(allocated, turns.free, _unmap, mapped).atexit = False
    return allocated


def available(turns: DriverTurns, integrated: bool) -> tuple[int, int]:
    """Return (free bytes, total bytes).

    On a Jetson, CPU and GPU share memory, and cuMemGetInfo counts the page cache as used although
    the system can reclaim it. There MemAvailable is the free memory.
    """
    answer = turns.api.cuMemGetInfo()
    if int(answer[0]):
        raise turns.faults.error(answer[0].name, "querying free memory")
    free, total = int(answer[1]), int(answer[2])
    if integrated:
        free = min(memory.available_bytes() or free, total)
    return free, total


def borrow(
    turns: DriverTurns, ordinal: int, address: int, nbytes: int, owner: object
) -> DeviceMemory:
    """Wrap the user's own device memory. Raises EngineError if it is not `nbytes` of aligned memory
    on this GPU.
    """
    doing = f"querying address {address:#x}"
    api, faults = turns.api, turns.faults
    attribute = api.CUpointer_attribute
    with faults.of(doing):
        handle = api.CUdeviceptr(address)

        def query(name: str) -> int:
            attribute_id = getattr(attribute, f"CU_POINTER_ATTRIBUTE_{name}")
            return int(faults.check(api.cuPointerGetAttribute(attribute_id, handle), doing))

        if query("MEMORY_TYPE") != _DEVICE_MEMORY or query("DEVICE_ORDINAL") != ordinal:
            raise EngineError(f"{address:#x} is not memory of GPU {ordinal}", field="address")
        room = query("RANGE_START_ADDR") + query("RANGE_SIZE") - address
    if nbytes > room:
        raise EngineError(f"{address:#x} has {room} bytes, not {nbytes}", field="nbytes")
    if address % ALIGNMENT:
        raise EngineError(f"{address:#x} does not start on {ALIGNMENT} bytes", field="address")
    return DeviceMemory(handle, nbytes, owner)


# -- host memory ----------------------------------------------------------------------------------


class _Pinned:
    """Page-locked host memory with numpy's array interface."""

    def __init__(self, turns: DriverTurns, address: int, nbytes: int) -> None:
        self.turns = turns
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def pinned(turns: DriverTurns, nbytes: int) -> Bytes:
    """Allocate zeroed page-locked memory. The caller holds a turn. Raises EngineError."""
    if nbytes < 0:
        raise EngineError(f"cannot allocate {nbytes} bytes", field="nbytes")
    doing = f"allocating {nbytes} bytes of page-locked memory"
    with turns.faults.of(doing):
        address = int(turns.faults.check(turns.api.cuMemHostAlloc(max(1, nbytes), 0), doing))
    holder = _Pinned(turns, address, nbytes)
    weakref.finalize(holder, turns.free, turns.api.cuMemFreeHost, address).atexit = False
    out: Bytes = np.asarray(holder)
    out[:] = 0
    return out


def checked(turns: DriverTurns, array: Bytes, name: str) -> tuple[int, object]:
    """Return the address of an array from `pinned`, or of a slice of one, and the memory's holder.

    Raises EngineError for any other array.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, _Pinned) or base.turns is not turns:
        raise EngineError("was not allocated by this device's `host`", field=name)
    if array.dtype != np.uint8 or not array.flags.c_contiguous:
        raise EngineError("must be contiguous bytes", field=name)
    return int(array.ctypes.data), base


def within(held: Any, at: int, nbytes: int, name: str) -> int:
    """Return the address `at` bytes into device memory.

    Raises EngineError if `nbytes` from there do not lie within it.
    """
    if not isinstance(held, DeviceMemory):
        raise EngineError(f"must be GPU memory, not {type(held).__name__}", field=name)
    if at < 0 or nbytes < 0 or at + nbytes > held.nbytes:
        raise EngineError(
            f"bytes {at} to {at + nbytes} are not within its {held.nbytes}", field=name
        )
    return held.address + at


# -- memory in pieces ------------------------------------------------------------------------------

# For Jetsons whose driver refuses large buffers although memory is free: NvMap of L4T 36.4.7 (its
# fix of CVE-2025-33177, "error 12"). CUDA's virtual memory management can allocate piece by piece.
# Others report that this works on the board; it is untested here.


def _can_map(api: Any, faults: DriverFaults, ordinal: int) -> bool:
    """Return whether the GPU supports virtual memory management."""
    kind = api.CUdevice_attribute(_VIRTUAL_MEMORY_SUPPORTED)
    return bool(faults.check(api.cuDeviceGetAttribute(kind, ordinal), "querying the GPU"))


class Mapped:
    """A reserved address range; its first `filled` bytes are backed by memory."""

    def __init__(self, api: Any, address: Any, nbytes: int) -> None:
        self.api = api
        self.address = address
        self.nbytes = nbytes
        self.filled = 0


def _reserve(api: Any, faults: DriverFaults, ordinal: int, nbytes: int) -> Mapped:
    """Reserve and map at least `nbytes`. Raises EngineError, with everything released."""
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    flag = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    doing = f"reserving addresses for {nbytes} bytes"
    unit = int(faults.check(api.cuMemGetAllocationGranularity(properties, flag), doing))
    piece = -(-PIECE // unit) * unit
    size = -(-nbytes // unit) * unit
    start = faults.check(api.cuMemAddressReserve(size, 0, 0, 0), doing)
    mapped = Mapped(api, start, size)
    try:
        while mapped.filled < size:
            _add_piece(mapped, faults, properties, min(piece, size - mapped.filled))
        access = api.CUmemAccessDesc()
        access.location.type = properties.location.type
        access.location.id = ordinal
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        faults.check(api.cuMemSetAccess(start, size, [access], 1), "granting access to memory")
    except BaseException:
        _unmap(mapped)
        raise
    return mapped


def _add_piece(mapped: Mapped, faults: DriverFaults, properties: Any, size: int) -> None:
    api, doing = mapped.api, f"allocating {size} bytes of {mapped.nbytes}"
    handle = faults.check(api.cuMemCreate(size, properties, 0), doing)
    try:
        at = int(mapped.address) + mapped.filled
        faults.check(api.cuMemMap(at, size, 0, handle, 0), doing)
        mapped.filled += size
    finally:
        # the mapping keeps the memory alive
        api.cuMemRelease(handle)


def _unmap(mapped: Mapped) -> tuple[Any, ...]:
    """Release everything and return the driver's answer, the first error if there is one."""
    api = mapped.api
    answer: tuple[Any, ...] = (api.CUresult.CUDA_SUCCESS,)
    if mapped.filled:
        answer = api.cuMemUnmap(mapped.address, mapped.filled)
    freed: tuple[Any, ...] = api.cuMemAddressFree(mapped.address, mapped.nbytes)
    return answer if int(answer[0]) else freed
