"""Kernels of a running engine: from the bundle, or compiled here and now.

The runtime reaches this module by name, so that it never imports what compiles.
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
    """Gives a variant's kernel and its cubin."""

    def get(self, variant: Variant) -> tuple[CompiledKernel, bytes]:
        """Raises BundleError when it is missing or damaged."""
        ...


def kernels_for(
    bundle: Bundle, plan: LaunchPlan, sm: int, progress: Progress | None = None
) -> KernelSource:
    """The bundle's kernels for an architecture; without them, compiled where Triton is installed.

    Raises BundleError: neither (it says what to do), or the bundle's are damaged; EngineError: one
    cannot be compiled.
    """
    try:
        bundled = open_kernels(bundle, sm)
    except BundleError as problem:
        # only what is missing is made: what is damaged is refused
        if problem.field != f"kernels.sm_{sm}" or not can_compile():
            raise
        return compiled_here(plan.variants, sm, progress)
    if all(variant.key in bundled.index.kernels for variant in plan.variants) or not can_compile():
        return bundled
    return compiled_here(plan.variants, sm, progress)


def compiled_here(
    variants: Iterable[Variant], sm: int, progress: Progress | None = None
) -> KernelSource:
    """Kernels by the Triton of this machine: also for a driver that refuses the bundle's.

    They are cached; the first time takes about a second a kernel. Raises EngineError.
    """
    try:
        return compile_variants(variants, [sm], progress)[sm]
    except ExportError as problem:
        raise EngineError(
            problem.message, file=problem.file, field=problem.field, remedy=problem.remedy
        ) from problem


def can_compile() -> bool:
    """Whether Triton is installed here."""
    try:
        triton_version()
    except ExportError:
        return False
    return True
