"""The `cuda` engine: a bundle's launch plan on a device, one recorded graph of launches a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.config import ModelConfig
from edge.errors import EngineError, StateError
from edge.runtime.cuda.device import Memory
from edge.runtime.cuda.exclusive import Exclusive
from edge.runtime.cuda.executor import Executor
from edge.runtime.cuda.inputs import DeviceRun, Sources
from edge.runtime.cuda.runs import StateRuns
from edge.runtime.cuda.state import DeviceState
from edge.runtime.cuda.workspace import DeviceWorkspace, Floats
from edge.runtime.engine import DEFAULT_WINDOW, MAX_WINDOW, Rows, layout_of
from edge.runtime.layout import Identity, StateLayout
from edge.runtime.state import State, check_run

DEFAULT_CHUNK = 256


class CudaEngine:
    """A launch plan on one device. Several states, each on its own thread, may share it: their runs
    follow one another.

    Attributes:
        plan: what is run.
        exclusive: the device.
        executor: runs the plan's programs.
        sources: how inputs are computed.
        identity: what the states it makes belong to.
    """

    name = "cuda"

    def __init__(
        self,
        config: ModelConfig,
        exclusive: Exclusive,
        executor: Executor,
        *,
        chunk: int = DEFAULT_CHUNK,
        identity: Identity,
        state_dtypes: Mapping[str, str] | None = None,
    ) -> None:
        """Raises BundleError: the plan wants an input that this version does not make."""
        self.plan = executor.plan
        self.config = config
        self.exclusive = exclusive
        self.executor = executor
        self.chunk = chunk
        self.identity = identity
        self.sources = Sources(self.plan, getattr(exclusive.device, "multiprocessors", 0))
        self._state_dtypes = dict(state_dtypes or {})
        self._arena: Memory | None = None
        self._runs: dict[tuple[int, int, int], StateRuns] = {}

    # -- states ----------------------------------------------------------------------------------

    def new_state(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> DeviceState:
        """See `Engine.new_state`."""
        self.exclusive.check_process()
        layout = self._layout(batch, window, capacity)
        slots = self.executor.state_slots(window)
        state = DeviceState(layout, self.identity, self.exclusive, window=window, slots=slots)
        self.attach(state)
        return state

    def _layout(self, batch: int, window: int, capacity: int | None) -> StateLayout:
        """Raises InputError."""
        dtypes, logs = self._state_dtypes, self.plan.logs
        return layout_of(self.config, batch, window, capacity, dtypes, logs)

    def attach(self, state: DeviceState) -> None:
        """Give a state the workspace its runs need.

        Raises StateError without memory, EngineError for sizes that this engine cannot run.
        """
        self.executor.check(self.runs(state.layout, state.window))
        try:
            state.workspace = DeviceWorkspace(self, state)
        except EngineError as problem:
            raise StateError(
                f"no room for the runs of a state: {problem.message}",
                remedy="make window or batch smaller",
            ) from problem

    def arena(self, nbytes: int) -> Memory:
        """Memory for the values of one run, shared by all states: runs follow one another."""
        if self._arena is None or self._arena.nbytes < nbytes:
            with self.exclusive as device:
                self._arena = device.allocate(max(1, nbytes))
        return self._arena

    def runs(self, layout: StateLayout, window: int) -> StateRuns:
        """The runs that a state of this layout can ask for; states of the same sizes share them."""
        key = (layout.batch, window, layout.capacity)
        if key not in self._runs:
            self._runs[key] = StateRuns(
                plan=self.plan,
                executor=self.executor,
                chunk=self.chunk,
                layout=layout,
                window=window,
                vocab=self.config.vocab_size,
            )
        return self._runs[key]

    def memory_plan(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> dict[str, int]:
        """See `Engine.memory_plan`. On the device, but for `logits`, which are here."""
        return self.runs(self._layout(batch, window, capacity), window).memory_plan()

    # -- running ---------------------------------------------------------------------------------

    def run(
        self,
        tokens: NDArray[np.int64],
        state: State,
        *,
        parents: Sequence[int] | None = None,
        rows: Rows = "last",
        commit: bool = False,
    ) -> NDArray[np.float32]:
        """See `Engine.run`."""
        logits: Floats = self._performed(DeviceWorkspace.run, tokens, state, parents, rows, commit)
        return logits.transpose(1, 0, 2)

    def run_greedy(self, tokens: NDArray[np.int64], state: State) -> NDArray[np.int64]:
        """Run tokens [B, T] as `run` does; of the last the likeliest next token [B], found on the
        device, so that no logits cross to the host. It may be a padding id of the vocabulary.

        Raises as `run` does, but of logits that are not finite sees a NaN alone.
        """
        ids: NDArray[np.int32] = self._performed(
            DeviceWorkspace.pick, tokens, state, None, "last", commit=False
        )
        return ids[-1].astype(np.int64)

    @property
    def trees(self) -> bool:
        """See `Engine`."""
        return self.executor.trees

    @property
    def longest_window(self) -> int:
        """See `Engine`."""
        return MAX_WINDOW

    @property
    def finds_argmax(self) -> bool:
        """Whether `run_greedy` can be asked: plans of older versions end with their logits."""
        return all(program.picks for program in self.plan.programs if program.kind == "chain")

    def _performed(
        self,
        work: Callable[[DeviceWorkspace, DeviceRun], NDArray[Any]],
        tokens: NDArray[np.int64],
        state: State,
        parents: Sequence[int] | None,
        rows: Rows,
        commit: bool,
    ) -> NDArray[Any]:
        self.exclusive.check_process()
        workspace = state.workspace
        if not isinstance(state, DeviceState) or getattr(workspace, "engine", None) is not self:
            raise StateError("the state belongs to another engine")
        with state.held():
            request = check_run(
                tokens, state, parents, rows, commit,
                vocab_size=self.config.vocab_size, chunk=self.chunk,
            )  # fmt: skip
            if commit:
                step = state.ledger.commit(request.count)
            else:
                state.ledger = state.ledger.with_room(request.count)
                step = state.ledger.run(request.count, parents=request.parents)
            with self.exclusive:
                found = work(workspace, DeviceRun(request.tokens, step, request.row_indices))
            state.ledger = step.after
            return found
