"""What every engine offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.config import ModelConfig
from edge.errors import EdgeError, EngineError, InputError
from edge.launch import Log
from edge.runtime.layout import StateLayout
from edge.runtime.request import Rows as Rows
from edge.runtime.state import State

DEFAULT_WINDOW = 8
MAX_WINDOW = 256
MAX_BATCH = 1024
# What the head reads, by its name in graphs and plans; where the recipe rounds it, the name of the
# int8 numbers, and of what a unit of them is.
HIDDEN, ROUNDED_HIDDEN, HIDDEN_SCALE = "final", "final.q", "final.scale"


class Engine(ABC):
    """Runs a model's graph over states it has made.

    Attributes:
        name: `ort`, `cpu`, `cuda` or `tensorrt`.
        chunk: most tokens of one committing run.
        provider: what ONNX Runtime runs on: `cpu`, `cuda` or `tensorrt`; None for other engines.
        passed_over: why `auto` did not take `cpu`; None where it did, or an engine was named.
    """

    name: str
    config: ModelConfig
    chunk: int
    provider: str | None = None
    passed_over: EdgeError | None = None

    @property
    def trees(self) -> bool:
        """Whether it runs drafted trees, of one sequence at least; else chains alone."""
        return True

    @property
    def longest_window(self) -> int:
        """The largest window that a state may have."""
        return MAX_WINDOW

    @property
    def finds_argmax(self) -> bool:
        """Whether `run_greedy` can be asked: it spares the host the logits."""
        return False

    @property
    def most_joined(self) -> int:
        """Most states of one `step_jointly`; 1 where this model's steps cannot be joined."""
        return 1

    @abstractmethod
    def new_state(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> State:
        """A cleared state of `batch` sequences with everything its runs need, allocated now.

        `window`: most tokens of a run that can be taken back. `capacity`: tokens the KV caches
        hold; None is the trained context, at most 4096; ignored without attention.
        Raises InputError for sizes out of range, StateError without memory.
        """

    @abstractmethod
    def run(
        self,
        tokens: NDArray[np.int64],
        state: State,
        *,
        parents: Sequence[int] | None = None,
        rows: Rows = "last",
        commit: bool = False,
    ) -> NDArray[np.float32]:
        """Run tokens [B, T] from the live state on; logits [B, L, V] of the `rows` asked for.

        Without `commit` T is at most the window and every token can be taken back. With it T is at
        most `chunk` and only the state after the last token is kept. `parents` makes the tokens a
        tree: parents[t] < t is the token before t, -1 the live state; `state.select(node)` must
        follow. `rows`: "last", "all", or token indices in the order wanted.

        The logits are a view of memory the state owns, valid until its next run.

        Raises InputError (ids, shapes, tree, rows), ContextFullError (KV caches), StateError (a
        state of another engine, a tree waiting for `select`), EngineError (another thread, a forked
        process, logits that are not finite, a failure inside). Whatever is raised, the state is
        where it was; only `reach` may be shorter.
        """

    def run_greedy(self, tokens: NDArray[np.int64], state: State) -> NDArray[np.int64]:
        """`run` of a chain that can be taken back; the likeliest token [B] after the last one, the
        lowest of equal ones. Raises as `run` does.
        """
        raise EngineError(f"engine {self.name} does not choose tokens itself")

    def step_jointly(self, steps: Sequence[JointStep]) -> list[Stepped]:
        """One token for each of at most `most_joined` states of one sequence, as `run` and
        `run_greedy` would give it one by one, to the bit, in one run that reads each weight once.

        What is wrong with one state is its own result, and the others continue. Raises EngineError
        where the run itself failed: every state is then where it was.
        """
        raise EngineError(f"engine {self.name} does not join steps")

    def hidden(self) -> tuple[Engine, float]:
        """An engine over the same weights whose `run` gives what the head would read, [B, L,
        d_model] in units of the second value, and spares the head. Its states are its own.

        Raises EngineError: this model's plan, or this engine, does not give them.
        """
        raise EngineError(
            f"engine {self.name} gives logits, not hidden states",
            field="engine",
            remedy="load the model with the engine cpu, cuda or ort",
        )

    @abstractmethod
    def memory_plan(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> dict[str, int]:
        """Bytes by purpose, for one state of these sizes (`edge.runtime.memory`)."""


def _inner(name: str) -> Any:
    """A property that is the inner engine's own."""
    return property(lambda wrapper: getattr(wrapper.engine, name))


class WrappedEngine(Engine):
    """Another engine, `engine`, but for its runs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.chunk = engine.chunk

    name = _inner("name")
    config = _inner("config")
    provider = _inner("provider")
    trees = _inner("trees")
    longest_window = _inner("longest_window")
    finds_argmax = _inner("finds_argmax")
    new_state = _inner("new_state")
    memory_plan = _inner("memory_plan")


def layout_of(
    config: ModelConfig,
    batch: int,
    window: int,
    capacity: int | None,
    dtypes: Mapping[str, str],
    logs: Mapping[str, Log] | None = None,
) -> StateLayout:
    """The layout of a state that `Engine.new_state` is asked for. Raises InputError."""
    within(batch, MAX_BATCH, "batch")
    within(window, MAX_WINDOW, "window")
    if capacity is not None and config.has_attention:
        within(capacity, config.max_context or 1 << 24, "capacity")
    return StateLayout.of(config, batch=batch, capacity=capacity, dtypes=dtypes, logs=logs)


def within(value: int, limit: int, name: str) -> None:
    """Raises InputError: the size called `name` is not 1 … limit."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise InputError(f"must be 1 … {limit}, got {value!r}", field=name)


def forked(what: str) -> EngineError:
    """The refusal of an engine in a process that was forked from its own, where `what` not here."""
    return EngineError(
        f"the engine was loaded before this process was forked: its {what} not here",
        remedy="load the model in the child process",
    )


@dataclass(frozen=True)
class JointStep:
    """The next token of one state. `greedy`: the likeliest token after it is wanted, no logits."""

    token: int
    state: State
    greedy: bool = False


# logits [V], a view of memory the state owns; or the likeliest token; or why there is none
Stepped = NDArray[np.float32] | int | EdgeError
