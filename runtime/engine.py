"""The interface of all engines."""

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
# Names of the head's input in graphs and plans: as floats, or as int8 values and their scale if the
# recipe quantizes it.
HIDDEN, ROUNDED_HIDDEN, HIDDEN_SCALE = "final", "final.q", "final.scale"


class Engine(ABC):
    """Runs a model's graph over states that it has created.

    Attributes:
        name: `ort`, `cpu`, `cuda` or `tensorrt`.
        chunk: maximum number of tokens in a committing run.
        provider: ONNX Runtime's provider, `cpu`, `cuda` or `tensorrt`; None for other engines.
        passed_over: reason why `auto` did not choose `cpu`; None if it did, or if an engine was
            named.
    """

    name: str
    config: ModelConfig
    chunk: int
    provider: str | None = None
    passed_over: EdgeError | None = None

    @property
    def trees(self) -> bool:
        """Whether the engine runs drafted trees, at least of one sequence; if not, chains only."""
        return True

    @property
    def most_tree(self) -> int:
        """Maximum number of tokens of a run of a drafted tree of one sequence."""
        return MAX_WINDOW

    @property
    def longest_window(self) -> int:
        """The largest window that a state may have."""
        return MAX_WINDOW

    @property
    def finds_argmax(self) -> bool:
        """Whether `run_greedy` is supported, which avoids copying logits to the host."""
        return False

    @property
    def most_joined(self) -> int:
        """Maximum number of states in `step_jointly`; 1 if this model's steps cannot be joined."""
        return 1

    @abstractmethod
    def new_state(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> State:
        """Return a cleared state of `batch` sequences, with everything its runs need allocated.

        Args:
            batch: number of sequences.
            window: maximum number of tokens that can be rewound.
            capacity: number of tokens the KV caches hold; None is the trained context, at most
                4096. Ignored without attention.

        Raises InputError for sizes out of range, StateError if memory runs out.
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
        """Run tokens [B, T] from the live state and return logits [B, L, V] of the given `rows`.

        Without `commit`, T is at most the window and every token can be rewound. With `commit`, T
        is at most `chunk` and only the state after the last token is kept. `parents` makes the
        tokens a tree: parents[t] < t is the token before t, or -1 for the live state;
        `state.select(node)` must follow. `rows`: "last", "all", or token indices in any order.

        The logits are a view of memory the state owns, valid until its next run.

        Raises InputError (ids, shapes, tree, rows), ContextFullError (KV caches), StateError (a
        state of another engine, a tree waiting for `select`) and EngineError (another thread, a
        forked process, logits that are not finite, an internal failure). After an error the state
        is unchanged, except that `reach` may be shorter.
        """

    def run_greedy(self, tokens: NDArray[np.int64], state: State) -> NDArray[np.int64]:
        """Run a chain that can be rewound and return the likeliest next token [B].

        Of equally likely tokens, the lowest id wins. Raises as `run` does.
        """
        raise EngineError(f"engine {self.name} does not choose tokens itself")

    def step_jointly(self, steps: Sequence[JointStep]) -> list[Stepped]:
        """Step at most `most_joined` single-sequence states by one token each, in one run.

        The run reads each weight once. The results are bit-identical to those of `run` and
        `run_greedy` for each state alone. An error of one state is that state's result, and the
        others continue. Raises EngineError if the run itself fails; every state is then unchanged.
        """
        raise EngineError(f"engine {self.name} does not join steps")

    def hidden(self) -> tuple[Engine, float]:
        """Return an engine over the same weights whose `run` gives the head's input, and its unit.

        Its `run` skips the head and returns [B, L, d_model] in multiples of the unit. It does not
        share states with this engine. Raises EngineError if this engine, or this model's plan, does
        not give hidden states.
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
        """Return bytes by purpose for one state of these sizes (`edge.runtime.memory`)."""


def _forwarded(name: str) -> Any:
    """Return a property that forwards to the wrapped engine."""
    return property(lambda wrapper: getattr(wrapper.engine, name))


class WrappedEngine(Engine):
    """Base of engines that wrap another, `engine`, and change only how it runs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.chunk = engine.chunk

    name = _forwarded("name")
    config = _forwarded("config")
    provider = _forwarded("provider")
    trees = _forwarded("trees")
    most_tree = _forwarded("most_tree")
    longest_window = _forwarded("longest_window")
    finds_argmax = _forwarded("finds_argmax")
    new_state = _forwarded("new_state")
    memory_plan = _forwarded("memory_plan")


def layout_of(
    config: ModelConfig,
    batch: int,
    window: int,
    capacity: int | None,
    dtypes: Mapping[str, str],
    logs: Mapping[str, Log] | None = None,
) -> StateLayout:
    """Return the layout of a state for the arguments of `Engine.new_state`. Raises InputError."""
    within(batch, MAX_BATCH, "batch")
    within(window, MAX_WINDOW, "window")
    check_capacity(config, capacity)
    return StateLayout.of(config, batch=batch, capacity=capacity, dtypes=dtypes, logs=logs)


def check_capacity(config: ModelConfig, capacity: int | None) -> None:
    """Raise InputError if a state of the model cannot hold so many tokens."""
    if capacity is not None and config.has_attention:
        within(capacity, config.max_context or 1 << 24, "capacity")


def within(value: int, limit: int, name: str) -> None:
    """Raise InputError unless the size called `name` is from 1 to `limit`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise InputError(f"must be from 1 to {limit:,}, not {value!r}", field=name)


def forked(what: str) -> EngineError:
    """Return the error for using an engine in a forked child. `what`: such as "threads are"."""
    return EngineError(
        f"the engine was loaded before this process was forked: its {what} not here",
        remedy="load the model in the child process",
    )


@dataclass(frozen=True)
class JointStep:
    """The next token of one state. `greedy`: return the likeliest next token, not logits."""

    token: int
    state: State
    greedy: bool = False


# logits [V], a view of memory the state owns; or the likeliest token; or the error
Stepped = NDArray[np.float32] | int | EdgeError
