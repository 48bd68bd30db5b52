"""The available engines, and how one is chosen and loaded."""

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
    """Raise EngineError for an unknown engine."""
    if name not in ENGINES:
        raise EngineError(
            f"unknown engine {name!r:.60}",
            field="engine",
            remedy=f"choose {CHOICES}",
        )


def has_providers(engine: str) -> bool:
    """Return whether a provider may be given with this engine; `auto` then means `ort`."""
    return engine in ("auto", "ort")


def check_provider(engine: str, provider: str | None) -> None:
    """Check the names of engine and provider.

    Raises EngineError for an unknown name, here or in EDGE_ORT_PROVIDERS, and for a provider given
    with an engine that has none.
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


def check_pin(pin: bool, engine: str, provider: str | None) -> None:
    """Raise EngineError if `pin` is given with another engine than `cpu`."""
    if engine == "auto" and (provider is not None or ort_providers.listed()):
        engine = "ort"
    if pin and engine not in ("auto", "cpu"):
        raise EngineError(
            f"engine {engine} does not pin its threads: only cpu does",
            field="pin",
            remedy="choose --engine cpu, or leave pin out",
        )


def on_cpu(engine: str, provider: str | None) -> bool:
    """Return whether an engine, with this provider if it is `ort`, runs on the CPU."""
    return engine == "cpu" or (engine == "ort" and provider in (None, ort_providers.CPU))


def title(engine: Engine) -> str:
    """Return an engine's display name, with the provider unless that is the CPU's."""
    plain = engine.provider in (None, ort_providers.CPU)
    return engine.name if plain else f"{engine.name} ({engine.provider})"


def open_engine(
    bundle: Bundle,
    name: str = "auto",
    *,
    threads: int | None = None,
    spin: bool = False,
    pin: bool = False,
    provider: str | None = None,
) -> Engine:
    """Load a bundle into the engine called `name`.

    "auto" is `cpu` if its kernels are compiled and the bundle has a launch plan for them, otherwise
    `ort`, whose `passed_over` then says why. Naming a provider, here or in EDGE_ORT_PROVIDERS,
    selects `ort`. No consumer GPU has run `cuda` yet.

    Args:
        bundle: the bundle to load.
        name: one of `ENGINES`.
        threads: CPU threads of `ort` and `cpu`; None is one per physical core this process may use,
            or one for a small model.
        spin: whether threads of `ort` busy-wait for work: faster on an otherwise idle machine, far
            slower beside other work.
        pin: keep thread i of `cpu` on the i-th CPU this process may use. The caller, thread 0, is
            left as it is.
        provider: provider of `ort`, `cpu`, `cuda` or `tensorrt`; None is the first that starts of
            those EDGE_ORT_PROVIDERS lists, or the CPU.

    Raises BundleError and EngineError, the latter also if the provider does not run here or is
    given with another engine, if the CPU kernels are not compiled, or if another engine than `cpu`
    or this system cannot pin threads; InputError for more pinned threads than CPUs.
    """
    check_provider(name, provider)
    check_pin(pin, name, provider)
    if name == "cpu" or pin:
        return _open_cpu(bundle, threads, pin)
    if name == "cuda":
        from edge.runtime.cuda.opening import from_bundle

        return from_bundle(bundle)
    if name == "tensorrt":
        from edge.runtime.tensorrt import opening

        return opening.from_bundle(bundle)
    if name == "ort" or provider is not None or ort_providers.listed():
        return _open_ort(bundle, threads, spin, provider)
    try:
        return _open_cpu(bundle, threads, pin=False)
    except (BundleError, EngineError) as problem:
        if problem.field == SET_VARIABLE:
            raise
        cpu_error: EdgeError = problem
    try:
        importlib.import_module("edge.runtime.ort")
    except EngineError as ort_error:
        raise EngineError(
            f"{cpu_error.message}, and {ort_error.message}",
            file=cpu_error.file,
            field=cpu_error.field,
            remedy=f"{cpu_error.remedy}; or {ort_error.remedy}",
        ) from None
    engine = _open_ort(bundle, threads, spin, None)
    engine.passed_over = cpu_error
    return engine


def _open_cpu(bundle: Bundle, threads: int | None, pin: bool) -> CpuEngine:
    from edge.runtime.cpu.engine import CpuEngine

    return CpuEngine.from_bundle(bundle, threads=threads, pin=pin)


def _open_ort(bundle: Bundle, threads: int | None, spin: bool, provider: str | None) -> OrtEngine:
    from edge.runtime import memory  # imported late: programs start without numpy to save memory
    from edge.runtime.ort import OrtEngine

    memory.check_load(memory.plan_bundle(bundle.manifest, window=1, capacity=1), bundle.path)
    return OrtEngine.from_bundle(bundle, threads=threads, spin=spin, provider=provider)
