"""Kernels for a running engine, from the bundle or compiled on this machine.

The runtime imports this module by name at run time, so it does not depend on the compiler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from edge.bundle import Bundle
from edge.bundle.kernels import open_kernels
from edge.errors import BundleError, EngineError, ExportError
from edge.launch import CompiledKernel, LaunchPlan, Variant
from edge.plugins.compiler.aot import Progress, compile_variants, triton_version


class KernelSource(Protocol):
    """A source of compiled kernels."""

    def get(self, variant: Variant) -> tuple[CompiledKernel, bytes]:
        """Return a variant's kernel and cubin. Raises BundleError when missing or damaged."""
        ...


def kernels_for(
    bundle: Bundle, plan: LaunchPlan, sm: int, progress: Progress | None = None
) -> KernelSource:
    """Return the bundle's kernels, or compile them if some are missing and Triton is installed.

    Raises BundleError when the kernels are damaged, or when the bundle has none for `sm` and Triton
    is not installed. Raises EngineError when a kernel cannot be compiled.
    """
    try:
        bundled = open_kernels(bundle, sm)
    except BundleError as problem:
        # missing kernels are compiled, but damaged ones are an error
        if problem.field != f"kernels.sm_{sm}" or not can_compile():
            raise
        return compiled_here(plan.variants, sm, progress)
    if all(variant.key in bundled.index.kernels for variant in plan.variants) or not can_compile():
        return bundled
    return compiled_here(plan.variants, sm, progress)


def compiled_here(
    variants: Iterable[Variant], sm: int, progress: Progress | None = None
) -> KernelSource:
    """Compile kernels with this machine's Triton, also for a driver that rejects the bundle's.

    Kernels are cached; the first time takes about a second per kernel. Raises EngineError.
    """
    try:
        return compile_variants(variants, [sm], progress)[sm]
    except ExportError as problem:
        raise EngineError(
            problem.message, file=problem.file, field=problem.field, remedy=problem.remedy
        ) from problem


def can_compile() -> bool:
    """Return whether Triton is installed here."""
    try:
        triton_version()
    except ExportError:
        return False
    return True
