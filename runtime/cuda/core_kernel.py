"""Compiled kernels: loaded, checked against their variant, and what a launch hands them."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

from edge.errors import EngineError
from edge.launch import CompiledKernel, Variant
from edge.runtime.cuda.faults import Faults
from edge.runtime.cuda.install import Modules

WARP = 32
# dynamic shared memory that a kernel gets without asking (CUDA C++ Programming Guide, 7.x on)
_FREE_SHARED = 48 << 10

_Convert = Callable[[Any], Any]
# Triton's scalar types: how one is passed, and its bytes. A plain int cuda-core takes for an
# address.
_SCALARS: dict[str, tuple[_Convert, int]] = {
    "i1": (ctypes.c_int8, 1), "i8": (ctypes.c_int8, 1), "u8": (ctypes.c_uint8, 1),
    "i16": (ctypes.c_int16, 2), "i32": (ctypes.c_int32, 4), "u32": (ctypes.c_uint32, 4),
    "i64": (ctypes.c_int64, 8), "u64": (ctypes.c_uint64, 8),
    "fp32": (ctypes.c_float, 4), "fp64": (ctypes.c_double, 8),
}  # fmt: skip
_RANGES = {
    kind: ((-(1 << 8 * size - 1), 1 << 8 * size - 1) if kind[0] == "i" else (0, 1 << 8 * size))
    for kind, (_, size) in _SCALARS.items()
    if kind[0] in "iu" and kind != "i1"
}


class LoadedKernel:
    """A kernel on the device, ready to launch.

    Attributes:
        name: `file.function`, for messages.
        kernel: cuda-core's Kernel; it keeps its code loaded.
    """

    def __init__(self, variant: Variant, compiled: CompiledKernel, kernel: Any) -> None:
        self.name = variant.kernel
        self.kernel = kernel
        self.threads = WARP * variant.warps
        self.shared = compiled.shared_bytes
        self._names = variant.arguments
        self._types = [kind.removesuffix(":16") for kind in variant.types]
        self._aligned = [kind.endswith(":16") for kind in variant.types]
        self._nulls = (0,) * compiled.scratch
        self.sizes = [size_of(kind) for kind in self._types] + [8] * compiled.scratch

    def pack(self, arguments: Sequence[int | float]) -> tuple[Any, ...]:
        """What cuda-core passes on. Raises EngineError: a wrong number, range or alignment."""
        if len(arguments) != len(self._types):
            raise EngineError(
                f"{self.name} takes {len(self._types)} arguments, not {len(arguments)}"
            )
        out = []
        for name, kind, aligned, value in zip(
            self._names, self._types, self._aligned, arguments, strict=True
        ):
            if aligned and int(value) % 16:
                raise EngineError(
                    f"{value:#x} is not a multiple of 16", field=f"{self.name}.{name}"
                )
            if kind[0] == "*":
                out.append(int(value))
                continue
            low, high = _RANGES.get(kind, (None, None))
            if low is not None and high is not None and not low <= value < high:
                raise EngineError(f"{value} is not an {kind}", field=f"{self.name}.{name}")
            out.append(_SCALARS[kind][0](value))
        return (*out, *self._nulls)


def size_of(kind: str) -> int:
    """Bytes of a parameter of this Triton type. Raises EngineError."""
    if kind[0] == "*":
        return struct.calcsize("P")
    if kind not in _SCALARS:
        raise EngineError(f"a kernel parameter cannot be of type {kind}")
    return _SCALARS[kind][1]


def load(
    modules: Modules,
    faults: Faults,
    ordinal: int,
    variant: Variant,
    compiled: CompiledKernel,
    cubin: bytes,
) -> LoadedKernel:
    """Load a cubin and find its kernel, within a turn. Raises EngineError."""
    api = modules.api
    attribute = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    most = int(faults.check(api.cuDeviceGetAttribute(attribute, ordinal), "asking the GPU"))
    if compiled.shared_bytes > most:
        raise EngineError(
            f"{variant.kernel} needs {compiled.shared_bytes} bytes of shared memory, this GPU has "
            f"{most}",
            file=compiled.file,
            remedy="compile for this GPU: edge export --target",
        )
    with faults.of(f"loading {compiled.file}"):
        kernel = _code(modules, cubin).get_kernel(compiled.symbol)
    loaded = LoadedKernel(variant, compiled, kernel)
    _check_parameters(loaded, compiled)
    handle = api.CUkernel(int(kernel.handle))
    with faults.of(f"loading {variant.kernel}"):
        if compiled.shared_bytes > _FREE_SHARED:
            kind = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            doing = f"giving {variant.kernel} {compiled.shared_bytes} bytes of shared memory"
            answer = api.cuKernelSetAttribute(
                kind, compiled.shared_bytes, handle, api.CUdevice(ordinal)
            )
            faults.check(answer, doing)
        # else the driver puts it off until the first launch, which may be while a graph is recorded
        faults.check(api.cuKernelGetFunction(handle), f"loading {variant.kernel}")
    return loaded


# cuda-core never unloads code, so the same code is loaded once a process. A CUlibrary belongs to no
# context and serves every GPU.
_codes: dict[bytes, Any] = {}


def _code(modules: Modules, cubin: bytes) -> Any:
    key = hashlib.sha256(cubin).digest()
    if key not in _codes:
        _codes[key] = modules.core.ObjectCode.from_cubin(cubin)
    return _codes[key]


def _check_parameters(loaded: LoadedKernel, compiled: CompiledKernel) -> None:
    """A launch with too few parameters would have the driver read past them."""
    try:
        sizes = [info.size for info in loaded.kernel.arguments_info]
    except Exception:
        return  # drivers before CUDA 12.4 do not say; the file's hash was checked
    if sizes != loaded.sizes:
        raise EngineError(
            f"{loaded.name} takes parameters of {sizes} bytes, its variant says {loaded.sizes}",
            file=compiled.file,
            remedy="compile again: edge export --target",
        )
