"""Memory on the GPU, and host memory that it copies without staging."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from edge.errors import EngineError
from edge.runtime import memory
from edge.runtime.cuda.device import ALIGNMENT, Bytes
from edge.runtime.cuda.faults import DriverFaults
from edge.runtime.cuda.turns import DriverTurns

# small enough for a fragmented board, large enough that a gigabyte is 32 calls
PIECE = 32 << 20
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class DeviceMemory:
    """Bytes on the GPU; see `device.Memory`. `owner` is kept alive where the memory is the user's.

    Attributes:
        address: as kernels take it.
        nbytes: how many.
    """

    __slots__ = ("__weakref__", "address", "handle", "nbytes", "owner")

    def __init__(self, handle: Any, nbytes: int, owner: object = None) -> None:
        self.handle = handle
        self.address = int(handle)
        self.nbytes = nbytes
        self.owner = owner


def allocate(turns: DriverTurns, ordinal: int, nbytes: int, integrated: bool) -> DeviceMemory:
    """Memory of this size, not yet zeroed, within a turn. Raises EngineError."""
    if nbytes < 0:
        raise EngineError(f"cannot allocate {nbytes} bytes", field="nbytes")
    doing = f"allocating {nbytes} bytes"
    with turns.faults.of(doing):
        code, handle = turns.api.cuMemAlloc(max(1, nbytes))
        if code == turns.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return _in_pieces(turns, ordinal, nbytes, integrated)
        turns.faults.check((code,), doing)
    got = DeviceMemory(handle, nbytes)
    weakref.finalize(got, turns.free, turns.api.cuMemFree, handle).atexit = False
    return got


def _in_pieces(turns: DriverTurns, ordinal: int, nbytes: int, integrated: bool) -> DeviceMemory:
    """Allocate in pieces what was refused: a Jetson that has the memory may give it so. Raises
    EngineError."""
    free, total = available(turns, integrated)
    text = f"the GPU has no room for {nbytes} bytes: {free} of {total} are free"
    if not integrated or free <= nbytes:
        raise EngineError(
            text, remedy="use a smaller model, window or capacity, or stop other programs"
        )
    refused = EngineError(
        f"{text}, and yet the driver refused",
        remedy="L4T 36.4.7 refuses large allocations (NvMap error 12): update to L4T 36.5, "
        "or restart the board if its memory is fragmented",
    )
    if not _can_map(turns.api, turns.faults, ordinal):
        raise refused
    try:
        mapped = _reserve(turns.api, turns.faults, ordinal, nbytes)
    except EngineError as problem:
        raise refused from problem
    got = DeviceMemory(mapped.address, nbytes)
    weakref.finalize(got, turns.free, _unmap, mapped).atexit = False
    return got


def available(turns: DriverTurns, integrated: bool) -> tuple[int, int]:
    """Bytes that are free and that there are.

    On a Jetson, CPU and GPU share the memory and cuMemGetInfo does not count the page cache, which
    the system gives back: there MemAvailable is what is free.
    """
    answer = turns.api.cuMemGetInfo()
    if int(answer[0]):
        raise turns.faults.error(answer[0].name, "asking for the free memory")
    free, total = int(answer[1]), int(answer[2])
    if integrated:
        free = min(memory.available_bytes() or free, total)
    return free, total


def borrow(
    turns: DriverTurns, ordinal: int, address: int, nbytes: int, owner: object
) -> DeviceMemory:
    """The user's own device memory. Raises EngineError where the driver knows it otherwise."""
    doing = f"asking about address {address:#x}"
    api, faults = turns.api, turns.faults
    attribute = api.CUpointer_attribute
    with faults.of(doing):
        handle = api.CUdeviceptr(address)

        def ask(name: str) -> int:
            which = getattr(attribute, f"CU_POINTER_ATTRIBUTE_{name}")
            return int(faults.check(api.cuPointerGetAttribute(which, handle), doing))

        if ask("MEMORY_TYPE") != _DEVICE or ask("DEVICE_ORDINAL") != ordinal:
            raise EngineError(f"{address:#x} is not memory of GPU {ordinal}", field="address")
        room = ask("RANGE_START_ADDR") + ask("RANGE_SIZE") - address
    if nbytes > room:
        raise EngineError(f"{address:#x} has {room} bytes, not {nbytes}", field="nbytes")
    if address % ALIGNMENT:
        raise EngineError(f"{address:#x} does not start on {ALIGNMENT} bytes", field="address")
    return DeviceMemory(handle, nbytes, owner)


# -- host memory ----------------------------------------------------------------------------------


class _Pinned:
    """Page-locked host memory, as numpy takes it."""

    def __init__(self, turns: DriverTurns, address: int, nbytes: int) -> None:
        self.turns = turns
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def pinned(turns: DriverTurns, nbytes: int) -> Bytes:
    """Zeroed page-locked memory, within a turn. Raises EngineError."""
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
    """The address of an array made by `pinned`, or of a slice, and what holds the memory.

    Raises EngineError for any other.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, _Pinned) or base.turns is not turns:
        raise EngineError("is not memory that this device's `host` made", field=name)
    if array.dtype != np.uint8 or not array.flags.c_contiguous:
        raise EngineError("must be contiguous bytes", field=name)
    return int(array.ctypes.data), base


def within(held: Any, at: int, nbytes: int, name: str) -> int:
    """The address `at` bytes into device memory. Raises EngineError: the bytes are not in it."""
    if not isinstance(held, DeviceMemory):
        raise EngineError(f"a {type(held).__name__} is not memory of a GPU", field=name)
    if at < 0 or nbytes < 0 or at + nbytes > held.nbytes:
        raise EngineError(
            f"bytes {at} to {at + nbytes} are not within its {held.nbytes}", field=name
        )
    return held.address + at


# -- memory in pieces ------------------------------------------------------------------------------

# For Jetsons whose driver refuses large buffers though memory is free: NvMap of L4T 36.4.7 (its fix
# of CVE-2025-33177, "error 12"). CUDA's virtual memory management asks for memory by the piece.
# That the board then gives it is what others report; it has not been tried.


def _can_map(api: Any, faults: DriverFaults, ordinal: int) -> bool:
    """Whether the GPU can do it at all."""
    kind = api.CUdevice_attribute(_SUPPORTED)
    return bool(faults.check(api.cuDeviceGetAttribute(kind, ordinal), "asking the GPU"))


class Mapped:
    """A reserved range of addresses, and how much of it has memory behind it."""

    def __init__(self, api: Any, address: Any, nbytes: int) -> None:
        self.api = api
        self.address = address
        self.nbytes = nbytes
        self.filled = 0


def _reserve(api: Any, faults: DriverFaults, ordinal: int, nbytes: int) -> Mapped:
    """Memory of at least this size. Raises EngineError; then nothing is left of it."""
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
        faults.check(api.cuMemSetAccess(start, size, [access], 1), "opening memory to the GPU")
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
        # the mapping keeps it
        api.cuMemRelease(handle)


def _unmap(mapped: Mapped) -> tuple[Any, ...]:
    """Give everything back; the driver's answer to that."""
    api = mapped.api
    answer: tuple[Any, ...] = (api.CUresult.CUDA_SUCCESS,)
    if mapped.filled:
        answer = api.cuMemUnmap(mapped.address, mapped.filled)
    later: tuple[Any, ...] = api.cuMemAddressFree(mapped.address, mapped.nbytes)
    return answer if int(answer[0]) else later
