"""The `cuda` engine: runs a bundle's launch plan, replaying one recorded graph per step."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.config import ModelConfig
from edge.errors import EngineError, StateError
from edge.launch import LOGITS, PICKED
from edge.runtime.cuda.device import Bytes, Exclusive, Memory, RecordedGraph
from edge.runtime.cuda.executor import Executor, Issuer, Places, PreparedWork
from edge.runtime.cuda.hidden import before_head
from edge.runtime.cuda.inputs import DeviceRun, Sources
from edge.runtime.cuda.launching import KernelCall, Launches, PlanExecutor
from edge.runtime.cuda.runs import RunKey, StateRuns
from edge.runtime.cuda.sliding import fitted
from edge.runtime.cuda.state import DeviceState
from edge.runtime.engine import DEFAULT_WINDOW, MAX_WINDOW, Engine, Rows, layout_of
from edge.runtime.layout import NUMPY, Identity, StateLayout
from edge.runtime.ledger import ReplayStep, Slots
from edge.runtime.request import check_run
from edge.runtime.state import State

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]

DEFAULT_CHUNK = 256
# maximum number of prepared runs kept besides the recorded ones
_MAX_PREPARED = 64


def not_finite() -> EngineError:
    """Return the error for logits that are not finite."""
    return EngineError("the logits are not finite", remedy="check the bundle, or clear the state")


class CudaEngine(Engine):
    """Runs a launch plan on one device. Several states, each on its own thread, may share an
    engine; their runs are serialized.

    Attributes:
        plan: launch plan.
        exclusive: the device with its lock.
        executor: runs the plan's programs.
        sources: computes the inputs of runs.
        identity: identity of the states that the engine makes.
        width: number of values per row of a run's result.
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
        """Raises BundleError if the plan has an input that this version does not provide."""
        self.plan = executor.plan
        self.config = config
        self.exclusive = exclusive
        self.executor = executor
        self.chunk = chunk
        self.identity = identity
        self.sources = Sources(self.plan, getattr(exclusive.device, "multiprocessors", 0))
        self.width = config.vocab_size
        self.state_dtypes = dict(state_dtypes or {})
        self._arena: Memory | None = None
        self._runs: dict[tuple[int, int, int], StateRuns] = {}

    # -- states ----------------------------------------------------------------------------------

    def new_state(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> DeviceState:
        self.exclusive.check_process()
        layout = self._layout(batch, window, capacity)
        slots = self.executor.state_slots(window)
        state = DeviceState(layout, self.identity, self.exclusive, window=window, slots=slots)
        self.attach(state)
        return state

    def _layout(self, batch: int, window: int, capacity: int | None) -> StateLayout:
        """Return the layout of a new state. Raises InputError."""
        dtypes, logs = self.state_dtypes, self.plan.logs
        layout = layout_of(self.config, batch, window, capacity, dtypes, logs)
        return fitted(layout, self.plan, window=window, chunk=self.chunk)

    def attach(self, state: DeviceState) -> None:
        """Give a state the workspace that its runs need.

        Raises StateError if memory is short, EngineError for sizes that this engine cannot run.
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
        """Return memory for the values of one run. All states share it, as runs are serialized."""
        if self._arena is None or self._arena.nbytes < nbytes:
            with self.exclusive as device:
                self._arena = device.allocate(max(1, nbytes))
        return self._arena

    def runs(self, layout: StateLayout, window: int) -> StateRuns:
        """Return the runs of a state with this layout; states of equal sizes share them."""
        key = (layout.batch, window, layout.capacity)
        if key not in self._runs:
            self._runs[key] = StateRuns(
                plan=self.plan,
                executor=self.executor,
                chunk=self.chunk,
                layout=layout,
                window=window,
                width=self.width,
            )
        return self._runs[key]

    def memory_plan(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> dict[str, int]:
        """See `Engine.memory_plan`. All on the device except `logits`, which are on the host."""
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
        logits: Floats = self._execute(DeviceWorkspace.run, tokens, state, parents, rows, commit)
        return logits.transpose(1, 0, 2)

    def run_greedy(self, tokens: NDArray[np.int64], state: State) -> NDArray[np.int64]:
        """See `Engine.run_greedy`. The argmax runs on the device: the result may be a padding id of
        the vocabulary, and of logits that are not finite only NaN is detected.
        """
        ids: Ids = self._execute(DeviceWorkspace.pick, tokens, state)
        return ids[-1].astype(np.int64)

    @property
    def trees(self) -> bool:
        return self.executor.trees

    @property
    def most_tree(self) -> int:
        """See `Engine.most_tree`: kernels for trees exist for few rows only."""
        rows = [program.max_rows for program in self.plan.programs if program.kind == "tree"]
        return max((MAX_WINDOW if most is None else most for most in rows), default=1)

    @property
    def finds_argmax(self) -> bool:
        """Whether `run_greedy` is supported: plans of older versions end with the logits."""
        return all(program.picks for program in self.plan.programs if program.kind == "chain")

    def hidden(self) -> tuple[Engine, float]:
        """See `Engine.hidden`. The two engines share weights and kernels."""
        if not isinstance(self.executor, PlanExecutor):
            return super().hidden()
        plan, unit = before_head(self.plan)
        shared = self.executor
        executor = PlanExecutor(plan, shared.kernels, shared.weights, self.exclusive.device)
        engine = type(self)(
            self.config, self.exclusive, executor,
            chunk=self.chunk, identity=self.identity, state_dtypes=self.state_dtypes,
        )  # fmt: skip
        engine.width = self.config.d_model
        return engine, unit

    def _execute(
        self,
        work: Callable[[DeviceWorkspace, DeviceRun], NDArray[Any]],
        tokens: NDArray[np.int64],
        state: State,
        parents: Sequence[int] | None = None,
        rows: Rows = "last",
        commit: bool = False,
    ) -> NDArray[Any]:
        self.exclusive.check_process()
        with state.hold:
            request = check_run(self, tokens, state, parents, rows, commit)
            assert isinstance(state, DeviceState)
            state.ledger = state.ledger.with_room(0 if commit else request.count)
            if state.layout.slots is not None:
                state.make_room(request.count)
            first = state.ledger.first
            if commit:
                step = state.ledger.commit(request.count)
            else:
                step = state.ledger.run(request.count, parents=request.parents)
            with self.exclusive:
                run = DeviceRun(request.tokens, step, request.row_indices, first)
                result = work(state.workspace, run)
            state.ledger = step.after
            return result


class PreparedRun:
    """A run of one size with every address resolved.

    Attributes:
        inputs: views of the block that is copied to the device.
        logits: result of a run without `picked`, [L, B, V].
        picked: result of a run with `picked`, token ids [L, B].
        work: the executor's work between the copies in and out.
        recorded: whether the run is to be recorded.
        graph: the recorded graph; None before recording, when launches are issued one by one.
    """

    def __init__(self, workspace: DeviceWorkspace, key: RunKey, *, recorded: bool = False) -> None:
        runs, spacious = workspace.runs, workspace.runs.spacious(key)
        self._device = workspace.engine.exclusive.device
        self._arena, self._memory = workspace.arena, workspace.memory
        block = runs.block(spacious)
        self._host = workspace.host[: block.nbytes]
        self.inputs = block.views(workspace.host, runs.sizes(key))
        places = workspace.places(spacious)
        self.recorded = recorded
        self._issued = False
        self.work: PreparedWork = workspace.issuer.prepare(key, places, recorded=recorded)
        offsets, shape = runs.arena(spacious).offsets, (key.rows, runs.batch)
        dtype = NUMPY[runs.out]
        self.logits: Floats = np.zeros((0, *shape[1:], runs.width), dtype)
        self.picked: Ids = np.zeros((0, runs.batch), np.int32)
        if key.picked:
            self._out = workspace.picked[: runs.picked_bytes(key.rows)]
            self._out_offset = offsets[PICKED]
            self.picked = self._out.view(np.int32).reshape(shape)
        else:
            self._out = workspace.out[: runs.logits_bytes(key.rows)]
            self._out_offset = offsets.get(LOGITS, 0)
            self.logits = self._out.view(dtype).reshape(*shape, runs.width)
        self.graph: RecordedGraph | None = None

    def record(self) -> None:
        """Record the run as a graph."""
        with self._device.record() as graphs:
            self._issue()
        self.graph = graphs[0]

    def run(self, step: ReplayStep) -> None:
        """Run and wait. The inputs of `step` must be written. Raises EngineError."""
        if self.graph is None and self.recorded and self._issued and self.work.recordable:
            self.record()
        if self.graph is None:
            self._issue()
            self._issued = True
        else:
            self.graph.replay()
        if self.work.finish is not None:
            self.work.finish(step)
        self._device.wait()

    def _issue(self) -> None:
        if self._host.size:
            self._device.write(self._memory, 0, self._host)
        self.work.issue()
        if self._out.size:
            self._device.read(self._out, self._arena, self._out_offset)


class DeviceWorkspace:
    """Inputs, logits and prepared runs of one state; values live in the engine's arena.

    Attributes:
        engine: the engine.
        runs: possible runs of the state.
        addresses: device address of each tensor, log and cache of the state.
        host, memory: input block on the host and on the device.
        out: logits on the host.
        picked: picked token ids on the host.
        arena: device memory for the values of a run, shared by the engine's states.
        issuer: prepares the state's runs.
        prepared: the runs prepared last.
    """

    def __init__(self, engine: CudaEngine, state: DeviceState) -> None:
        # no reference to the state: a cycle would keep its memory until the next garbage collection
        self.engine = engine
        self.runs = runs = engine.runs(state.layout, state.window)
        self._key = functools.cache(runs.key)
        self.addresses = {name: state.address(name) for name in (*state.where, *state.cache_where)}
        # the state's memory must outlive the runs that point into it
        self._kept: Any = (state.recurrent, state.caches)
        self.prepared: OrderedDict[RunKey, PreparedRun] = OrderedDict()
        self.issuer: Issuer = engine.executor.issuer(runs, state)
        self._recorded = dict.fromkeys(runs.recorded())
        self._finite = np.zeros((runs.batch, runs.width), np.bool_)
        with engine.exclusive as device:
            nbytes = runs.inputs_bytes
            self.host: Bytes = device.host(nbytes)
            self.memory: Memory = device.allocate(nbytes)
            self.out: Bytes = device.host(runs.logits_bytes(runs.window))
            self.picked: Bytes = device.host(runs.picked_bytes(runs.window))
            self.arena: Memory = engine.arena(runs.values_bytes)
            self._record()

    def run(self, run: DeviceRun) -> Floats:
        """Return the logits [L, B, V] of a run, a view of memory that the next run overwrites.

        Raises EngineError if the device fails or the logits are not finite, InputError for a tree
        that fits no program.
        """
        prepared = self._perform(run, "chain" if run.step.parents is None else "tree")
        for row in prepared.logits:
            if not np.isfinite(row, out=self._finite).all():
                raise not_finite()
        return prepared.logits

    def pick(self, run: DeviceRun) -> Ids:
        """Return the argmax token of each wanted row, [L, B], as a view; the lowest id wins a tie.

        Raises EngineError if the device fails or a logit is NaN.
        """
        prepared = self._perform(run, "chain", picked=True)
        if (prepared.picked < 0).any():
            raise not_finite()
        return prepared.picked

    def own(self, row: Floats) -> Floats:
        """Copy logits [V] that another run computed for this state into the state's own memory."""
        copy = self.out[: row.nbytes].view(np.float32)
        copy[:] = row
        return copy

    def calls(self, key: RunKey) -> list[KernelCall]:
        """Return the launches of a run, to measure its kernels one by one."""
        work = self.prepared_run(key).work
        return work.calls if isinstance(work, Launches) else []

    def apply(self, state: DeviceState) -> Slots:
        """Apply the pending tokens to a copy of the live state in the spare slot.

        Runs only the scans and convolutions, from their logs.
        """
        with self.engine.exclusive:
            no_tokens = np.zeros((0, self.runs.batch), np.int64)
            self._perform(DeviceRun(no_tokens, state.ledger.applied(), ()), "settle")
        return Slots((state.ledger.spare,), (state.ledger.spare,), ())

    def places(self, spacious: RunKey) -> Places:
        """Return the addresses that runs of this layout read and write."""
        inputs = self.runs.block(spacious).offsets.items()
        values = self.runs.arena(spacious).offsets.items()
        return Places(
            {name: self.memory.address + at for name, at in inputs},
            {name: self.arena.address + at for name, at in values},
            self.addresses,
            self.arena,
        )

    def _perform(self, run: DeviceRun, kind: str, *, picked: bool = False) -> PreparedRun:
        prepared = self.prepared_run(self._key(kind, len(run.tokens), len(run.rows), picked))
        self.engine.sources.fill(prepared.inputs, run)
        prepared.run(run.step)
        return prepared

    def _record(self) -> None:
        """Record the usual runs, unless each must run once first: those wait for a second run."""
        if self.issuer.rehearses:
            return
        for key in self._recorded:
            prepared = self.prepared[key] = PreparedRun(self, key, recorded=True)
            prepared.record()

    def prepared_run(self, key: RunKey) -> PreparedRun:
        """Return a run of this size, from those prepared last or prepared now."""
        run = self.prepared.get(key)
        if run is not None:
            self.prepared.move_to_end(key)
            return run
        self._grow(key)
        run = self.prepared[key] = PreparedRun(self, key, recorded=key in self._recorded)
        unrecorded = [other for other, prepared in self.prepared.items() if prepared.graph is None]
        if len(unrecorded) > _MAX_PREPARED:
            del self.prepared[unrecorded[0]]
        return run

    def _grow(self, key: RunKey) -> None:
        """Grow buffers for an unusual run, such as all logits of a chunk, and keep them so."""
        values = self.runs.arena(self.runs.spacious(key)).total
        logits = self.runs.logits_bytes(key.rows)
        if values <= self.arena.nbytes and logits <= self.out.nbytes:
            return
        self.prepared.clear()
        if logits > self.out.nbytes:
            self.out = self.engine.exclusive.device.host(logits)
        if values > self.arena.nbytes:
            self.arena = self.engine.arena(values)
            self.issuer.moved()
        self._record()
