"""Cost of one run of a model by operator, op and layer, common to the profilers of all engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from edge.runtime.engine import Engine

CONTEXT = 4  # room in tokens beyond the run
HEAD = 1 << 30  # rank of the head, after all layers


@dataclass(frozen=True)
class RunKind:
    """A kind of run: `tokens` at once, `repeats` times. A prefill keeps only its last state."""

    tokens: int
    repeats: int
    prefill: bool = False


DECODE, PREFILL = RunKind(1, 20), RunKind(1 << 16, 2, prefill=True)


@dataclass(frozen=True)
class RunCost:
    """Milliseconds of one run.

    Attributes:
        total: time from entering the engine's library to leaving it.
        ops: time without nested operators, and count, by ONNX operator or kernel.
        parts: time by op of the model; empty if nodes could not be identified.
        layers: time by `layer N`, `embedding`, `head` or `once` (work for all layers together).
    """

    title: str
    total: float
    ops: dict[str, tuple[float, int]]
    parts: dict[str, float] = field(default_factory=dict)
    layers: dict[str, float] = field(default_factory=dict)

    @property
    def between(self) -> float:
        """Time between operators: the executor, and the profiler's own events."""
        return self.total - sum(spent for spent, _ in self.ops.values())

    def to_dict(self) -> dict[str, object]:
        ops = {name: {"ms": spent, "count": count} for name, (spent, count) in self.ops.items()}
        return {
            "total_ms": self.total,
            "between_ms": self.between,
            "ops": ops,
            "parts_ms": self.parts,
            "layers_ms": self.layers,
        }


def ranked(values: Mapping[str, float], most: int) -> list[tuple[str, float]]:
    """Return the `most` largest values, followed by the sum of the others."""
    ordered = sorted(values.items(), key=lambda item: -item[1])
    rest = sum(value for _, value in ordered[most:])
    return [*ordered[:most], *([("others", rest)] if rest > 0 else [])]


def along(layer: str) -> int:
    """Return the sort key of a layer name, in the order a token passes through layers."""
    ranks = {"once": -2, "embedding": -1, "head": HEAD}
    return ranks[layer] if layer in ranks else int(layer.removeprefix("layer "))


def runs(engine: Engine, kind: RunKind) -> Iterator[int]:
    """Do one warm-up run and `repeats` more. Yield the number of tokens after each."""
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
        yield count
        if not kind.prefill:
            state.rewind(count)
