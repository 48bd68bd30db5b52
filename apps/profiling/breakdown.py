"""Where the time of a run goes, from ONNX Runtime's own profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge.apps.profiling import optimized
from edge.apps.profiling.trace import Cost, read_events, summarise
from edge.bundle import open_bundle
from edge.errors import EngineError
from edge.runtime.engine import Engine

CONTEXT = 4  # tokens a step or a short run has before it


@dataclass(frozen=True)
class Kind:
    """What is run: `tokens` at once, `repeats` times; a prefill keeps its last state only."""

    tokens: int
    repeats: int
    prefill: bool = False


DECODE, PREFILL = Kind(1, 20), Kind(1 << 16, 2, prefill=True)


def breakdown(
    bundle: Path, threads: int | None, kinds: Mapping[str, Kind], *, spin: bool = False
) -> dict[str, Cost]:
    """Each kind of run under the profiler, by the engine a session would use.

    A longer prefill is done in chunks, of which one is run. Raises BundleError, EngineError.
    """
    return {name: _one(bundle, threads, name, kind, spin) for name, kind in kinds.items()}


def _one(bundle: Path, threads: int | None, name: str, kind: Kind, spin: bool) -> Cost:
    # other engines are measured where ONNX Runtime is not installed
    from edge.runtime.ort import OrtEngine

    with open_bundle(bundle) as opened, tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        engine = OrtEngine.from_bundle(
            opened, threads=threads, spin=spin, profile=place, provider="cpu"
        )
        count = _run(engine, kind)
        events = read_events(engine.end_profile())
        recipe = opened.manifest.quantization.recipe
        title = f"{recipe} {name}, one run of {count}"
        return summarise(title, events, kind.repeats, _places(place))


def _run(engine: Engine, kind: Kind) -> int:
    """One run to warm up and `repeats` more; how many tokens each had."""
    room = engine.config.max_context or kind.tokens + CONTEXT
    count = max(1, min(kind.tokens, engine.chunk, room - CONTEXT))
    state = engine.new_state(
        window=8 if kind.prefill else max(8, count),
        capacity=count + CONTEXT if engine.config.has_attention else None,
    )
    tokens = (np.arange(count, dtype=np.int64) % engine.config.vocab_size)[None]
    for _ in range(kind.repeats + 1):
        if kind.prefill:
            state.clear()
            engine.run(tokens, state, commit=True)
        else:
            engine.run(tokens, state, rows="all")
            state.rewind(count)
    return count


def _places(folder: Path) -> list[optimized.Place]:
    from edge.runtime.ort_session import OPTIMIZED_GRAPH

    path = folder / OPTIMIZED_GRAPH
    try:
        return optimized.places(optimized.read_nodes(path.read_bytes()))
    except (OSError, ValueError) as problem:
        raise EngineError(f"the optimized graph cannot be read: {problem}", file=path) from None


def ranked(values: Mapping[str, float], most: int) -> list[tuple[str, float]]:
    """The largest few, the others together as the last."""
    ordered: Iterable[tuple[str, float]] = sorted(values.items(), key=lambda item: -item[1])
    ordered = list(ordered)
    rest = sum(value for _, value in ordered[most:])
    return [*ordered[:most], *([("others", rest)] if rest > 0 else [])]
