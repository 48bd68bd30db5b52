"""What one state's runs need besides the state, made before the first of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.launch import LOGITS, PICKED
from edge.runtime.cuda.device import Bytes, Memory, RecordedGraph
from edge.runtime.cuda.executor import Issuer, Places, PreparedWork
from edge.runtime.cuda.inputs import DeviceRun
from edge.runtime.cuda.launching import KernelCall, Launches
from edge.runtime.cuda.runs import RunKey
from edge.runtime.cuda.state import DeviceState
from edge.runtime.ledger import ReplayStep, Slots

if TYPE_CHECKING:
    from edge.runtime.cuda.engine import CudaEngine

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]

# sizes kept ready besides the recorded ones
_KEPT = 64


def not_finite() -> EngineError:
    """Why a run has no answer."""
    return EngineError("the logits are not finite", remedy="check the bundle, or clear the state")


class PreparedRun:
    """A run of one size, with every address known.

    Attributes:
        inputs: views of the block that is copied to the device.
        logits: [L, B, V], what is copied back; of a run that picks, its ids [L, B] instead.
        work: what the executor does between the two copies.
        recorded: it is to be issued in one piece.
        graph: what was recorded of it; None until then, when it is issued piece by piece.
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
        self.logits: Floats = np.zeros((0, *shape[1:], runs.vocab), np.float32)
        self.picked: Ids = np.zeros((0, runs.batch), np.int32)
        if key.picked:
            self._out = workspace.picked[: runs.picked_bytes(key.rows)]
            self._at = offsets[PICKED]
            self.picked = self._out.view(np.int32).reshape(shape)
        else:
            self._out = workspace.out[: runs.logits_bytes(key.rows)]
            self._at = offsets.get(LOGITS, 0)
            self.logits = self._out.view(np.float32).reshape(*shape, runs.vocab)
        self.graph: RecordedGraph | None = None

    def record(self) -> None:
        """Record the run, to be issued in one piece."""
        with self._device.record() as graphs:
            self._issue()
        self.graph = graphs[0]

    def run(self, step: ReplayStep) -> None:
        """Until it is done; the inputs of `step` are written. Raises EngineError."""
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
            self._device.read(self._out, self._arena, self._at)


class DeviceWorkspace:
    """Inputs, logits and prepared runs of one state; values live in the engine's arena.

    Attributes:
        engine: whose it is.
        runs: what can be asked for.
        addresses: where each tensor, log and cache of the state starts.
        host, memory: the inputs, here and on the device.
        out, picked: the logits, and the ids of runs that pick, here.
        arena: device memory for the values of a run, shared by the engine's states.
        issuer: prepares its runs.
    """

    def __init__(self, engine: CudaEngine, state: DeviceState) -> None:
        # not the state itself: a cycle would keep its memory until the next garbage collection
        self.engine = engine
        self.runs = runs = engine.runs(state.layout, state.window)
        self.addresses = {name: state.address(name) for name in (*state.where, *state.cache_where)}
        # the state's memory lives as long as what points into it
        self._kept: Any = (state.recurrent, state.caches)
        self._prepared: OrderedDict[RunKey, PreparedRun] = OrderedDict()
        self.issuer: Issuer = engine.executor.issuer(runs, state)
        self._recorded = dict.fromkeys(runs.recorded())
        self._finite = np.zeros((runs.batch, runs.vocab), np.bool_)
        with engine.exclusive as device:
            nbytes = runs.inputs_bytes
            self.host: Bytes = device.host(nbytes)
            self.memory: Memory = device.allocate(nbytes)
            self.out: Bytes = device.host(runs.logits_bytes(runs.window))
            self.picked: Bytes = device.host(runs.picked_bytes(runs.window))
            self.arena: Memory = engine.arena(runs.values_bytes)
            self._record()

    def run(self, run: DeviceRun) -> Floats:
        """Logits [L, B, V] of a run; a view of memory that the next one overwrites.

        Raises EngineError: the device failed, or the logits are not finite; InputError: a tree that
        no program takes.
        """
        kind = "chain" if run.step.parents is None else "tree"
        prepared = self._ready(self.runs.key(kind, len(run.tokens), len(run.rows)))
        self._perform(prepared, run)
        for row in prepared.logits:
            if not np.isfinite(row, out=self._finite).all():
                raise not_finite()
        return prepared.logits

    def pick(self, run: DeviceRun) -> Ids:
        """The id of the largest logit of each wanted row, [L, B], the lowest of equal ones; a view.

        Raises EngineError as `run` does, for a NaN too.
        """
        key = self.runs.key("chain", len(run.tokens), len(run.rows))
        prepared = self._ready(key._replace(picked=True))
        self._perform(prepared, run)
        if (prepared.picked < 0).any():
            raise not_finite()
        return prepared.picked

    def own(self, row: Floats) -> Floats:
        """Logits [V] that another run made for this state, in its own memory."""
        mine = self.out[: row.nbytes].view(np.float32)
        mine[:] = row
        return mine

    def calls(self, key: RunKey) -> list[KernelCall]:
        """What a run launches, to measure its kernels one by one."""
        work = self._ready(key).work
        return work.calls if isinstance(work, Launches) else []

    def apply(self, state: DeviceState) -> Slots:
        """Apply the pending tokens to a copy of the live state, in the spare slot: the scans and
        convolutions alone, from their logs.
        """
        with self.engine.exclusive:
            prepared = self._ready(self.runs.key("settle", 0, 0))
            none = np.zeros((0, self.runs.batch), np.int64)
            self._perform(prepared, DeviceRun(none, state.ledger.applied(), ()))
        return Slots((state.ledger.spare,), (state.ledger.spare,), ())

    def places(self, spacious: RunKey) -> Places:
        """Where runs of this layout find what they read and write."""
        inputs = self.runs.block(spacious).offsets.items()
        values = self.runs.arena(spacious).offsets.items()
        return Places(
            {name: self.memory.address + at for name, at in inputs},
            {name: self.arena.address + at for name, at in values},
            self.addresses,
            self.arena,
        )

    def _perform(self, prepared: PreparedRun, run: DeviceRun) -> None:
        self.engine.sources.fill(prepared.inputs, run)
        prepared.run(run.step)

    def _record(self) -> None:
        """What must be run before it is recorded waits for its second run."""
        if self.issuer.rehearses:
            return
        for key in self._recorded:
            prepared = self._prepared[key] = PreparedRun(self, key, recorded=True)
            prepared.record()

    def _ready(self, key: RunKey) -> PreparedRun:
        found = self._prepared.get(key)
        if found is not None:
            self._prepared.move_to_end(key)
            return found
        self._grow(key)
        found = self._prepared[key] = PreparedRun(self, key, recorded=key in self._recorded)
        spare = [each for each, prepared in self._prepared.items() if prepared.graph is None]
        if len(spare) > _KEPT:
            del self._prepared[spare[0]]
        return found

    def _grow(self, key: RunKey) -> None:
        """Room for a run that was not foreseen: all logits of a chunk. Kept from then on."""
        values = self.runs.arena(self.runs.spacious(key)).total
        logits = self.runs.logits_bytes(key.rows)
        if values <= self.arena.nbytes and logits <= self.out.nbytes:
            return
        self._prepared.clear()
        if logits > self.out.nbytes:
            self.out = self.engine.exclusive.device.host(logits)
        if values > self.arena.nbytes:
            self.arena = self.engine.arena(values)
            self.issuer.moved()
        self._record()
