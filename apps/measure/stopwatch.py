"""Fair timing: taking turns, no garbage collection, and an engine that times its runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.runtime.engine import Engine, Rows, WrappedEngine
from edge.runtime.model import Model
from edge.runtime.state import State

T = TypeVar("T")
Clock = Callable[[], float]
Say = Callable[[str], None]

PAUSE = 0.05  # seconds after which another engine's idle threads have stopped spinning


def silent(text: str) -> None:
    """Report nothing."""


def in_turn(names: Sequence[T], number: int) -> list[T]:
    """Return all names, rotated by `number`, so that a different one begins each time."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def seconds(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Return the seconds that one call took."""
    return result_and_seconds(work, clock)[1]


def result_and_seconds(work: Callable[[], T], clock: Clock = time.perf_counter) -> tuple[T, float]:
    """Return what one call returned, and the seconds it took."""
    began = clock()
    result = work()
    return result, clock() - began


def median_ms(work: Callable[[], object], repeats: int, warm: int = 5) -> float:
    """Return the median of `repeats` calls in milliseconds, after `warm` warm-up calls."""
    for _ in range(warm):
        work()
    return 1e3 * median(seconds(work) for _ in range(repeats))


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection, which would add to the time of whatever runs at that moment."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# -- runs of an engine ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """Seconds of one run of `tokens` tokens. `reading`: whether it was committed, as prefill is."""

    seconds: float
    tokens: int
    reading: bool


class TimedEngine(WrappedEngine):
    """Wrapper that times the runs of an engine. The rest of an answer's time is the runtime's own.

    Attributes:
        runs: runs since the list was last cleared, in order.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.runs: list[Spent] = []

    def run(
        self,
        tokens: NDArray[np.int64],
        state: State,
        *,
        parents: Sequence[int] | None = None,
        rows: Rows = "last",
        commit: bool = False,
    ) -> NDArray[np.float32]:
        run = self.engine.run
        return self._timed(
            tokens, commit, lambda: run(tokens, state, parents=parents, rows=rows, commit=commit)
        )

    def run_greedy(self, tokens: NDArray[np.int64], state: State) -> NDArray[np.int64]:
        return self._timed(tokens, False, lambda: self.engine.run_greedy(tokens, state))

    def _timed(self, tokens: NDArray[np.int64], reading: bool, run: Callable[[], T]) -> T:
        result, spent = result_and_seconds(run)
        self.runs.append(Spent(spent, tokens.shape[1], reading))
        return result


def timed(model: Model) -> tuple[Model, TimedEngine]:
    """Return the model on a `TimedEngine`. Both share the weights and the engine's memory."""
    engine = TimedEngine(model.engine)
    copy = Model(
        model.path, model.manifest, model.fingerprint, engine, model.tokenizer, model.template
    )
    return copy, engine
