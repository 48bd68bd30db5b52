"""Which engines there are, and how one is chosen and loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge.errors import EngineError
from edge.runtime import ort_providers

if TYPE_CHECKING:
    from edge.bundle import Bundle
    from edge.runtime.engine import Engine

ENGINES = ("auto", "ort", "cpu", "cuda", "tensorrt")
CHOICES = f"{', '.join(ENGINES[:-1])} or {ENGINES[-1]}"


def choose_engine(name: str) -> str:
    """The engine that `name` means here. Raises EngineError: unknown.

    "auto" is "ort": `cpu` is slower in some recipes, and no consumer GPU has run `cuda` yet.
    """
    if name not in ENGINES:
        raise EngineError(
            f"unknown engine {name!r:.60}",
            field="engine",
            remedy=f"choose {CHOICES}",
        )
    return "ort" if name == "auto" else name


def check_provider(engine: str, provider: str | None) -> None:
    """Refuse a provider that means nothing to the engine. Raises EngineError: that, or an unknown
    name, here or in EDGE_ORT_PROVIDERS.
    """
    chosen = choose_engine(engine)
    if chosen == "ort":
        ort_providers.choose(provider)
    elif provider is not None:
        raise EngineError(
            f"engine {chosen} has no providers, which are ONNX Runtime's",
            field="provider",
            remedy="choose --engine ort, or leave the provider out",
        )


def on_cpu(engine: str, provider: str | None) -> bool:
    """Whether an engine, of ONNX Runtime one with this provider, runs on the CPU."""
    return engine == "cpu" or (engine == "ort" and provider in (None, ort_providers.CPU))


def provider_of(engine: Engine) -> str | None:
    """What an engine of ONNX Runtime runs on: `cpu`, `cuda` or `tensorrt`; None for the others."""
    return getattr(engine, "provider", None)


def title(engine: Engine) -> str:
    """An engine's name for people, with the provider where it is not the CPU's."""
    provider = provider_of(engine)
    return engine.name if provider in (None, ort_providers.CPU) else f"{engine.name} ({provider})"


def open_engine(
    bundle: Bundle,
    name: str = "auto",
    *,
    threads: int | None = None,
    spin: bool = False,
    provider: str | None = None,
) -> Engine:
    """Load a bundle's graph into the engine called `name`.

    `threads` is for `ort` and `cpu`: None is one per physical core this process may use, one for a
    small model. `spin` and `provider` are for `ort`: threads that spin wait for work awake, quicker
    on a machine that does nothing else and far slower beside other work; `provider` is `cpu`,
    `cuda` or `tensorrt`, None what EDGE_ORT_PROVIDERS lists (tried in turn), else the CPU. Raises
    BundleError, EngineError: also a provider that does not run here, or is named for another
    engine, or kernels for CPUs that were not compiled.
    """
    check_provider(name, provider)
    chosen = choose_engine(name)
    if chosen == "cpu":
        from edge.runtime.cpu.engine import CpuEngine

        return CpuEngine.from_bundle(bundle, threads=threads)
    if chosen == "cuda":
        from edge.runtime.cuda.opening import from_bundle

        return from_bundle(bundle)
    if chosen == "tensorrt":
        from edge.runtime.tensorrt import opening

        return opening.from_bundle(bundle)
    from edge.runtime.ort import OrtEngine

    return OrtEngine.from_bundle(bundle, threads=threads, spin=spin, provider=provider)
