"""A compiler process: it reads lines of JSON and answers each with a line of JSON and the cubin.

`edge.plugins.compiler.pool` starts it in a clean environment, without TRITON_INTERPRET.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from edge.errors import EdgeError, ExportError
from edge.launch import CompiledKernel, Variant
from edge.plugins.catalogue import kernel_module
from edge.plugins.compiler.cubin import resources

# Maximum shared memory per block in KB (CUDA C++ Programming Guide, Technical Specifications per
# Compute Capability)
_SHARED_KB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}


def main() -> None:
    """Answer requests {"variant", "sm"} with {"kernel", "ptxas", "bytes"} or {"error", …}."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Triton prints the source when ptxas fails
    for line in sys.stdin.buffer:
        request = json.loads(line)
        cubin = b""
        try:
            variant = Variant.model_validate(request["variant"])
            compiled, ptxas, cubin = compile_here(variant, request["sm"])
            answer: dict[str, Any] = {"kernel": compiled.model_dump(), "ptxas": ptxas}
        except EdgeError as problem:
            answer = {"error": problem.message, "remedy": problem.remedy}
        except Exception as problem:  # Triton raises many types, all about this kernel
            answer = {"error": _format_causes(problem), "remedy": None}
        answers.write(json.dumps({**answer, "bytes": len(cubin)}).encode() + b"\n" + cubin)
        answers.flush()


def _format_causes(problem: BaseException) -> str:
    """Format an exception and its causes: where Triton stopped and, innermost, why."""
    causes = [problem]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return "\n".join(f"{type(cause).__name__}: {cause}" for cause in causes)


def compile_here(variant: Variant, sm: int) -> tuple[CompiledKernel, str, bytes]:
    """Return the kernel, ptxas' version and the cubin. Raises ExportError and Triton's errors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource
    from triton.runtime import cache

    # Triton's own hashes all its files, for a cache that outlives it; the pool's is temporary
    cache.triton_key = lambda: triton.__version__
    function = _function(variant)
    # parameters newer than the plan keep their defaults
    defaults = {p.name: p.default for p in function.params if p.has_default}
    unset = {name: value for name, value in defaults.items() if name not in variant.arguments}
    constants = unset | variant.constants
    signature, attributes = _signature(variant, function.arg_names, constants)
    built = triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget("cuda", sm, 32),
        options={
            "num_warps": variant.warps,
            "num_stages": variant.stages,
            # round products and sums separately, as the references do
            "enable_fp_fusion": False,
        },
    )
    cubin = built.asm["cubin"]
    return described(variant, sm, built.metadata, cubin), get_ptxas(sm).version, cubin


def _function(variant: Variant) -> Any:
    from triton.runtime import JITFunction

    file, _, name = variant.kernel.partition(".")
    module = kernel_module(file)
    function = module and getattr(importlib.import_module(module), name, None)
    if not isinstance(function, JITFunction):
        raise ExportError(
            "this version of mamba-edge has no such kernel",
            remedy="export the model again with this version",
        )
    return function


def _signature(
    variant: Variant, names: list[str], constants: Mapping[str, Any]
) -> tuple[dict[str, str], dict[tuple[int, ...], list[list[Any]]]]:
    """Return the type of each parameter, and which parameters are multiples of 16."""
    runtime = tuple(name for name in names if name not in constants)
    if runtime != variant.arguments or not constants.keys() <= set(names):
        raise ExportError(
            f"its parameters are {', '.join(names)}; the plan gives {', '.join(variant.arguments)} "
            f"and the constants {', '.join(variant.constants)}",
            remedy="export the model again with this version",
        )
    types = dict(zip(variant.arguments, variant.types, strict=True))
    signature = {name: types.get(name, "constexpr").partition(":")[0] for name in names}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.endswith(":16")
    }
    return signature, aligned


def described(variant: Variant, sm: int, metadata: Any, cubin: bytes) -> CompiledKernel:
    for kind in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, kind):
            raise ExportError(f"needs {getattr(metadata, kind)} bytes of {kind}; none is given")
    if sm in _SHARED_KB and metadata.shared > _SHARED_KB[sm] << 10:
        raise ExportError(
            f"needs {metadata.shared} bytes of shared memory, but a block has {_SHARED_KB[sm]} KB"
        )
    usage = resources(cubin, metadata.name)
    if usage.threads != 32 * variant.warps:
        raise ExportError(f"needs blocks of {usage.threads} threads, not {32 * variant.warps}")
    return CompiledKernel(
        file=f"{variant.key}.cubin",
        symbol=metadata.name,
        shared_bytes=metadata.shared,
        scratch=usage.parameters - len(variant.arguments),
        registers=usage.registers,
        local_bytes=usage.local_bytes,
    )


if __name__ == "__main__":
    main()
