"""Which engines there are, and how one is chosen and loaded."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from edge.errors import BundleError, EdgeError, EngineError
from edge.plugins.cpu.library import SET_VARIABLE
from edge.runtime import ort_providers

if TYPE_CHECKING:
    from edge.bundle import Bundle
    from edge.runtime.cpu.engine import CpuEngine
    from edge.runtime.engine import Engine
    from edge.runtime.ort import OrtEngine

ENGINES = ("auto", "ort", "cpu", "cuda", "tensorrt")
CHOICES = f"{', '.join(ENGINES[:-1])} or {ENGINES[-1]}"


def check_engine(name: str) -> None:
    """Raises EngineError: there is no such engine."""
    if name not in ENGINES:
        raise EngineError(
            f"unknown engine {name!r:.60}",
            field="engine",
            remedy=f"choose {CHOICES}",
        )


def has_providers(engine: str) -> bool:
    """Whether a provider may be named with the engine: `auto` then is ONNX Runtime."""
    return engine in ("auto", "ort")


def check_provider(engine: str, provider: str | None) -> None:
    """Refuse a provider that means nothing to the engine. Raises EngineError: that, or an unknown
    name, here or in EDGE_ORT_PROVIDERS.
    """
    check_engine(engine)
    if has_providers(engine):
        ort_providers.choose(provider)
    elif provider is not None:
        raise EngineError(
            f"engine {engine} has no providers: only ort has them",
            field="provider",
            remedy="choose --engine ort, or leave the provider out",
        )


def on_cpu(engine: str, provider: str | None) -> bool:
    """Whether an engine, of ONNX Runtime one with this provider, runs on the CPU."""
    return engine == "cpu" or (engine == "ort" and provider in (None, ort_providers.CPU))


def title(engine: Engine) -> str:
    """An engine's name for people, with the provider where it is not the CPU's."""
    plain = engine.provider in (None, ort_providers.CPU)
    return engine.name if plain else f"{engine.name} ({engine.provider})"


def open_engine(
    bundle: Bundle,
    name: str = "auto",
    *,
    threads: int | None = None,
    spin: bool = False,
    provider: str | None = None,
) -> Engine:
    """Load a bundle into the engine called `name`.

    "auto" is `cpu` where its kernels are compiled and the bundle has a launch plan for them, else
    `ort`, which then says why (`passed_over`). Who names a provider, here or in
    EDGE_ORT_PROVIDERS, means `ort`. No consumer GPU has run `cuda` yet.

    `threads` is for `ort` and `cpu`: None is one per physical core this process may use, one for a
    small model. `spin` and `provider` are for `ort`: threads that spin wait for work awake, quicker
    on a machine that does nothing else and far slower beside other work; `provider` is `cpu`,
    `cuda` or `tensorrt`, None what EDGE_ORT_PROVIDERS lists (tried in turn), else the CPU. Raises
    BundleError, EngineError: also a provider that does not run here, or is named for another
    engine, or kernels for CPUs that were not compiled.
    """
    check_provider(name, provider)
    if name == "cpu":
        return _cpu(bundle, threads)
    if name == "cuda":
        from edge.runtime.cuda.opening import from_bundle

        return from_bundle(bundle)
    if name == "tensorrt":
        from edge.runtime.tensorrt import opening

        return opening.from_bundle(bundle)
    if name == "ort" or provider is not None or ort_providers.listed():
        return _ort(bundle, threads, spin, provider)
    try:
        return _cpu(bundle, threads)
    except (BundleError, EngineError) as problem:
        if problem.field == SET_VARIABLE:
            raise
        why: EdgeError = problem
    try:
        importlib.import_module("edge.runtime.ort")
    except EngineError as absent:
        raise EngineError(
            f"{why.message}, and {absent.message}",
            file=why.file,
            field=why.field,
            remedy=f"{why.remedy}; or {absent.remedy}",
        ) from None
    engine = _ort(bundle, threads, spin, None)
    engine.passed_over = why
    return engine


def _cpu(bundle: Bundle, threads: int | None) -> CpuEngine:
    from edge.runtime.cpu.engine import CpuEngine

    return CpuEngine.from_bundle(bundle, threads=threads)


def _ort(bundle: Bundle, threads: int | None, spin: bool, provider: str | None) -> OrtEngine:
    from edge.runtime import memory  # not above: programs start without numpy, where room is short
    from edge.runtime.ort import OrtEngine

    memory.check_load(memory.plan_bundle(bundle.manifest, window=1, capacity=1), bundle.path)
    return OrtEngine.from_bundle(bundle, threads=threads, spin=spin, provider=provider)
