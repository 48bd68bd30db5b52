"""Compile kernel variants for GPU architectures, through the cache."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edge.errors import ExportError
from edge.launch import CompiledKernel, KernelIndex, Variant
from edge.plugins.compiler import cache, pool

Progress = Callable[[int, int], None]
# torch's own builds install Triton under another name
DISTRIBUTIONS = ("triton", "pytorch-triton")
INSTALL = "pip install 'mamba-edge[kernels]' on Linux; in a checkout, run make test"


@dataclass(frozen=True)
class Kernels:
    """A plan's kernels for one architecture: the index, and the cubins by file name."""

    index: KernelIndex
    cubins: dict[str, bytes]

    def get(self, variant: Variant) -> tuple[CompiledKernel, bytes]:
        """Return a variant's kernel and cubin."""
        kernel = self.index.kernels[variant.key]
        return kernel, self.cubins[kernel.file]


def compile_variant(variant: Variant, sm: int) -> tuple[CompiledKernel, bytes]:
    """Compile a variant for one architecture (87 for sm_87), bypassing the cache.

    Raises ExportError when Triton is not installed, or the kernel cannot be compiled.
    """
    triton_version()
    with pool.Worker() as worker:
        compiled = worker.compile(variant, sm)
    return compiled.kernel, compiled.cubin


def compile_variants(
    variants: Iterable[Variant],
    architectures: Sequence[int],
    progress: Progress | None = None,
    *,
    precompiled: bool = True,
) -> dict[int, Kernels]:
    """Return all variants compiled for all architectures, by architecture.

    The same variants, Triton and ptxas give the same bytes.

    Args:
        variants: kernels to compile.
        architectures: compute capabilities, 87 for sm_87.
        progress: called with the number of finished kernels and the total.
        precompiled: whether to use kernels from EDGE_PRECOMPILED, which may be run but not shipped.

    Raises:
        ExportError: Triton is not installed, or a kernel cannot be compiled (`field` names it).
    """
    version = triton_version()
    unique = list({variant.key: variant for variant in variants}.values())
    total = len(unique) * len(architectures)
    finished = _cached(unique, architectures, version, precompiled)
    report = progress or (lambda done, of: None)
    report(len(finished), total)

    def store(variant: Variant, sm: int, compiled: pool.Compiled) -> None:
        cache.write(cache.entry(variant, sm, version), compiled)
        finished[variant.key, sm] = compiled
        report(len(finished), total)

    jobs = [(v, sm) for sm in architectures for v in unique if (v.key, sm) not in finished]
    pool.compile_each(jobs, store)
    return {
        sm: _collect(sm, version, {v.key: finished[v.key, sm] for v in unique})
        for sm in architectures
    }


def _cached(
    variants: Sequence[Variant], architectures: Sequence[int], version: str, precompiled: bool
) -> dict[tuple[str, int], pool.Compiled]:
    find = cache.find if precompiled else cache.find_own
    lookups = {
        (variant.key, sm): find(variant, sm, version)
        for sm in architectures
        for variant in variants
    }
    return {key: kernel for key, kernel in lookups.items() if kernel is not None}


def _collect(sm: int, version: str, kernels: dict[str, pool.Compiled]) -> Kernels:
    index = KernelIndex(
        sm=sm,
        triton=version,
        ptxas=", ".join(sorted({compiled.ptxas for compiled in kernels.values()})),
        kernels={key: compiled.kernel for key, compiled in kernels.items()},
    )
    return Kernels(index, {compiled.kernel.file: compiled.cubin for compiled in kernels.values()})


def triton_version() -> str:
    """Return the version of the installed Triton. Raises ExportError when none is installed."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    raise ExportError(
        "compiling kernels needs the package triton", field="--target", remedy=INSTALL
    )
