"""Device memory made of small pieces at consecutive addresses.

For Jetsons whose driver refuses large buffers though memory is free: NvMap of L4T 36.4.7 (its fix
of CVE-2025-33177, "error 12"). CUDA's virtual memory management asks for memory by the piece. That
the board then gives it is what others report; it has not been tried.
"""

from __future__ import annotations

from typing import Any

from edge.runtime.cuda.faults import DriverFaults

# small enough for a fragmented board, large enough that a gigabyte is 32 calls
PIECE = 32 << 20
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


def supported(api: Any, faults: DriverFaults, ordinal: int) -> bool:
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


def reserve(api: Any, faults: DriverFaults, ordinal: int, nbytes: int) -> Mapped:
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
            _add(mapped, faults, properties, min(piece, size - mapped.filled))
        access = api.CUmemAccessDesc()
        access.location.type = properties.location.type
        access.location.id = ordinal
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        faults.check(api.cuMemSetAccess(start, size, [access], 1), "opening memory to the GPU")
    except BaseException:
        release(mapped)
        raise
    return mapped


def _add(mapped: Mapped, faults: DriverFaults, properties: Any, size: int) -> None:
    api, doing = mapped.api, f"allocating {size} bytes of {mapped.nbytes}"
    handle = faults.check(api.cuMemCreate(size, properties, 0), doing)
    try:
        at = int(mapped.address) + mapped.filled
        faults.check(api.cuMemMap(at, size, 0, handle, 0), doing)
        mapped.filled += size
    finally:
        # the mapping keeps it
        api.cuMemRelease(handle)


def release(mapped: Mapped) -> tuple[Any, ...]:
    """Give everything back; the driver's answer to that."""
    api = mapped.api
    answer: tuple[Any, ...] = (api.CUresult.CUDA_SUCCESS,)
    if mapped.filled:
        answer = api.cuMemUnmap(mapped.address, mapped.filled)
    later: tuple[Any, ...] = api.cuMemAddressFree(mapped.address, mapped.nbytes)
    return answer if int(answer[0]) else later
