"""Compiled kernels: loads them, checks them against their variant, packs launch parameters."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from edge.errors import EngineError
from edge.launch import CompiledKernel, Variant
from edge.runtime.cuda.faults import DriverFaults
from edge.runtime.cuda.install import Modules

WARP = 32
# dynamic shared memory available without opting in (CUDA C++ Programming Guide, 7.x on)
_FREE_SHARED = 48 << 10

# Triton scalar types → `struct` format codes
_SCALARS = {
    "i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I",
    "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d",
}  # fmt: skip


class LoadedKernel:
    """A kernel on the device, ready to launch.

    Attributes:
        name: `file.function`, for messages.
        kernel: cuda-core's Kernel, which keeps the code loaded.
        function: CUfunction in the device's context.
        threads: threads per block.
        shared: bytes of dynamic shared memory per block.
        parameters: address of an array of pointers to the parameters, which `put` fills.
        sizes: bytes of each parameter.
    """

    def __init__(self, variant: Variant, compiled: CompiledKernel, kernel: Any) -> None:
        self.name = variant.kernel
        self.kernel = kernel
        self.function: Any = None
        self.threads = WARP * variant.warps
        self.shared = compiled.shared_bytes
        self._names = variant.arguments
        types = [kind.removesuffix(":16") for kind in variant.types]
        codes = [_code_of(kind) for kind in types]
        self._codes, self._types = codes, types
        self._aligned = [i for i, kind in enumerate(variant.types) if kind.endswith(":16")]
        self._nulls = (0,) * compiled.scratch
        all_codes = codes + ["P"] * compiled.scratch
        self.sizes = [struct.calcsize(code) for code in all_codes]
        # "@" aligns each value to its size, as a C compiler does
        self._layout = struct.Struct("@" + "".join(all_codes))
        self._values = ctypes.create_string_buffer(max(1, self._layout.size))
        start = ctypes.addressof(self._values)
        ends = [struct.calcsize("@" + "".join(all_codes[: i + 1])) for i in range(len(all_codes))]
        addresses = [start + end - size for end, size in zip(ends, self.sizes, strict=True)]
        self._pointers = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self.parameters = ctypes.addressof(self._pointers)

    def put(self, arguments: Sequence[int | float]) -> None:
        """Write the parameters of the next launch; the driver copies them when it is issued.

        Raises EngineError for a wrong count, a value out of range or a misaligned address.
        """
        if len(arguments) != len(self._names):
            raise EngineError(
                f"{self.name} takes {len(self._names)} arguments, not {len(arguments)}"
            )
        for i in self._aligned:
            if arguments[i] % 16:
                raise EngineError(
                    f"{int(arguments[i]):#x} is not a multiple of 16",
                    field=f"{self.name}.{self._names[i]}",
                )
        try:
            self._layout.pack_into(self._values, 0, *arguments, *self._nulls)
        except (struct.error, OverflowError, TypeError):
            raise self._argument_error(arguments) from None

    def _argument_error(self, arguments: Sequence[int | float]) -> EngineError:
        for name, kind, code, value in zip(
            self._names, self._types, self._codes, arguments, strict=True
        ):
            try:
                struct.pack(code, value)
            except (struct.error, OverflowError, TypeError):
                return EngineError(f"{value} is not of type {kind}", field=f"{self.name}.{name}")
        return EngineError(f"{self.name} cannot take {list(arguments)}")


def _code_of(kind: str) -> str:
    if kind[0] == "*":
        return "P"
    if kind not in _SCALARS:
        raise EngineError(f"a kernel parameter cannot be of type {kind}")
    return _SCALARS[kind]


def load(
    modules: Modules,
    faults: DriverFaults,
    ordinal: int,
    variant: Variant,
    compiled: CompiledKernel,
    cubin: bytes,
) -> LoadedKernel:
    """Load a cubin and look up its kernel. The caller holds a turn. Raises EngineError."""
    api = modules.api
    attribute = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    limit = int(faults.check(api.cuDeviceGetAttribute(attribute, ordinal), "querying the GPU"))
    if compiled.shared_bytes > limit:
        raise EngineError(
            f"{variant.kernel} needs {compiled.shared_bytes} bytes of shared memory, this GPU has "
            f"{limit}",
            file=compiled.file,
            remedy="compile for this GPU: edge export --target",
        )
    with faults.of(f"loading {compiled.file}"):
        kernel = _object_code(modules, cubin).get_kernel(compiled.symbol)
    loaded = LoadedKernel(variant, compiled, kernel)
    _check_parameters(loaded, compiled)
    handle = api.CUkernel(int(kernel.handle))
    with faults.of(f"loading {variant.kernel}"):
        if compiled.shared_bytes > _FREE_SHARED:
            kind = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            doing = f"granting {variant.kernel} {compiled.shared_bytes} bytes of shared memory"
            answer = api.cuKernelSetAttribute(
                kind, compiled.shared_bytes, handle, api.CUdevice(ordinal)
            )
            faults.check(answer, doing)
        # otherwise the driver loads at the first launch, possibly while a graph is recorded
        doing = f"loading {variant.kernel}"
        loaded.function = faults.check(api.cuKernelGetFunction(handle), doing)
    return loaded


# cuda-core never unloads code, so each cubin is loaded once per process. A CUlibrary belongs to no
# context and serves every GPU.
_object_codes: dict[bytes, Any] = {}


def _object_code(modules: Modules, cubin: bytes) -> Any:
    key = hashlib.sha256(cubin).digest()
    if key not in _object_codes:
        _object_codes[key] = modules.core.ObjectCode.from_cubin(cubin)
    return _object_codes[key]


def _check_parameters(loaded: LoadedKernel, compiled: CompiledKernel) -> None:
    """Check parameter sizes: with too few, the driver would read past the end at launch."""
    try:
        sizes = [info.size for info in loaded.kernel.arguments_info]
    except Exception:
        return  # drivers before CUDA 12.4 do not report sizes; the file's hash was checked
    if sizes != loaded.sizes:
        raise EngineError(
            f"{loaded.name} takes parameters of {sizes} bytes, its variant says {loaded.sizes}",
            file=compiled.file,
            remedy="compile again: edge export --target",
        )
