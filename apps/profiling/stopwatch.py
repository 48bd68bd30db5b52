"""An engine that tells how long its runs took, for what is left is the runtime's own time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.config import ModelConfig
from edge.errors import EngineError
from edge.runtime.engine import DEFAULT_WINDOW, Engine, GreedyEngine, Rows, provider_of
from edge.runtime.model import Model
from edge.runtime.state import State

T = TypeVar("T")


@dataclass(frozen=True)
class Spent:
    """Seconds of one run of so many tokens; `reading`: of a prompt, kept for good."""

    seconds: float
    tokens: int
    reading: bool


class TimedEngine(GreedyEngine):
    """Runs another engine.

    Attributes:
        runs: those since the list was last cleared, in order.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # asked once: it takes 50 µs, which every plain step would be charged with
        self._greedy = engine if isinstance(engine, GreedyEngine) else None
        self.runs: list[Spent] = []

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def provider(self) -> str | None:
        return provider_of(self._engine)

    @property
    def config(self) -> ModelConfig:
        return self._engine.config

    @property
    def chunk(self) -> int:
        return self._engine.chunk

    @property
    def trees(self) -> bool:
        return self._engine.trees

    @property
    def longest_window(self) -> int:
        return self._engine.longest_window

    @property
    def picks(self) -> bool:
        return self._greedy is not None and self._greedy.picks

    def new_state(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> State:
        return self._engine.new_state(batch=batch, window=window, capacity=capacity)

    def run(
        self,
        tokens: NDArray[np.int64],
        state: State,
        *,
        parents: Sequence[int] | None = None,
        rows: Rows = "last",
        commit: bool = False,
    ) -> NDArray[np.float32]:
        run = self._engine.run
        return self._timed(
            tokens, commit, lambda: run(tokens, state, parents=parents, rows=rows, commit=commit)
        )

    def run_greedy(self, tokens: NDArray[np.int64], state: State) -> NDArray[np.int64]:
        engine = self._greedy
        if engine is None:
            raise EngineError(f"engine {self.name} does not choose tokens itself")
        return self._timed(tokens, False, lambda: engine.run_greedy(tokens, state))

    def memory_plan(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> dict[str, int]:
        return self._engine.memory_plan(batch=batch, window=window, capacity=capacity)

    def _timed(self, tokens: NDArray[np.int64], reading: bool, run: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = run()
        self.runs.append(Spent(time.perf_counter() - began, tokens.shape[1], reading))
        return result


def timed(model: Model) -> tuple[Model, TimedEngine]:
    """The same model on a `TimedEngine`; both share the weights and the engine's memory."""
    engine = TimedEngine(model.engine)
    copy = Model(
        model.path, model.manifest, model.fingerprint, engine, model.tokenizer, model.template
    )
    return copy, engine
