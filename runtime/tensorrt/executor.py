"""An executor of the device graph: whole runs by one call of what was built from it.

TensorRT does that (`contexts`); in tests ONNX Runtime stands in its place. A state that only has to
catch up with its log (`settle`, no token) is still launched from the plan: there is no profile of
no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from edge.errors import EngineError, Faults
from edge.launch import ITEM_SIZE, LOGITS, PICKED, Buffer, LaunchPlan
from edge.plugins.tensorrt import OUT
from edge.runtime.cuda.device import ALIGNMENT, Device, Memory
from edge.runtime.cuda.executor import Issuer, Places, PreparedWork
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.runs import Arena, RunKey, StateRuns
from edge.runtime.cuda.state import DeviceState
from edge.runtime.layout import packed
from edge.runtime.ledger import KEEP, ReplayStep
from edge.runtime.tensorrt.contexts import BoundRun, EngineContexts, GraphRun
from edge.runtime.tensorrt.profiles import EngineSizes
from edge.runtime.tensorrt.tensors import buffers, lasting, shapes, symbols


class GraphExecutor:
    """See `edge.runtime.cuda.executor.Executor`.

    Attributes:
        launches: does what the graph does not.
        sizes: what the graph was built for.
    """

    def __init__(
        self,
        launches: PlanExecutor,
        contexts: EngineContexts,
        sizes: EngineSizes,
        rebuild: Callable[[EngineSizes], str],
    ) -> None:
        """`rebuild`: the command that builds it for other sizes."""
        self.launches = launches
        self.sizes = sizes
        self.contexts = contexts
        self._rebuild = rebuild
        # what the engine does not have of them are inputs of it
        self.constants = launches.weights.addresses()
        programs = launches.plan.programs
        self._applies = [program.kind == "settle" for program in programs]
        self._inputs = [
            launches.inputs(index)
            if applies
            else buffers(launches.plan, tree=programs[index].kind == "tree")
            for index, applies in enumerate(self._applies)
        ]

    @property
    def plan(self) -> LaunchPlan:
        return self.launches.plan

    @property
    def weights_bytes(self) -> int:
        """The graph's own, and what applying reads."""
        return self.contexts.weights_bytes + self.launches.weights_bytes

    @property
    def trees(self) -> bool:
        return self.contexts.trees

    @property
    def scratch_bytes(self) -> int:
        return self.contexts.scratch_bytes

    def inputs(self, program: int) -> Mapping[str, Buffer]:
        """All of the graph's, whichever the run."""
        return self._inputs[program]

    def state_slots(self, window: int) -> int:
        """What the graph's inputs have."""
        return 2

    def values(self, runs: StateRuns, spacious: RunKey) -> Arena:
        """What comes out of the graph, and is not in place."""
        if self._applies[spacious.program]:
            return self.launches.values(runs, spacious)
        nbytes = {
            LOGITS: runs.logits_bytes(spacious.rows),
            PICKED: runs.picked_bytes(spacious.rows),
        }
        if not self.contexts.in_place:
            for name, (dtype, shape) in lasting(runs).items():
                nbytes[name + OUT] = ITEM_SIZE[dtype] * math.prod(shape)
        return Arena(*packed(nbytes, ALIGNMENT))

    def check(self, runs: StateRuns) -> None:
        """Raises EngineError with the command that builds for such states."""
        wanted = EngineSizes(
            window=runs.window,
            batch=runs.batch,
            capacity=runs.layout.capacity,
            chunk=runs.chunk,
        )
        if self.sizes.covers(wanted):
            return
        faults, enough, built = Faults(), {}, self.sizes.model_dump()
        for name, value in wanted.model_dump().items():
            enough[name] = max(value, built[name])
            if value > built[name]:
                faults.add(name, f"is {value}, the engine was built for at most {built[name]}")
        larger = self._rebuild(EngineSizes(**enough))
        faults.refuse(EngineError, remedy=f"build it for more: {larger}")

    def issuer(self, runs: StateRuns, state: DeviceState) -> GraphIssuer:
        copies = None if self.contexts.in_place else Copies(state, self.launches.device)
        launches = self.launches.issuer(runs, state)
        return GraphIssuer(self.contexts, launches, runs, self.constants, copies)


class GraphIssuer:
    """See `edge.runtime.cuda.executor.Issuer`."""

    rehearses = True

    def __init__(
        self,
        contexts: EngineContexts,
        launches: Issuer,
        runs: StateRuns,
        constants: Mapping[str, int],
        copies: Copies | None,
    ) -> None:
        self.contexts = contexts
        self._launches = launches
        self._runs = runs
        self._constants = constants
        self._copies = copies
        self._own: dict[RunKey, BoundRun] = {}

    def prepare(self, key: RunKey, places: Places, *, recorded: bool) -> PreparedWork:
        if self._runs.plan.programs[key.program].kind == "settle":
            return self._launches.prepare(key, places, recorded=recorded)
        # what a run finds as likeliest is computed in every run, so one of its size serves both
        whole = key._replace(picked=False)
        addresses = self._addresses(places)
        bound = self._own.get(whole)
        if bound is None:
            run = GraphRun(symbols(self._runs, key), shapes(self._runs, key), addresses)
            bound = self.contexts.bound(run, own=recorded)
            if recorded:
                self._own[whole] = bound
        else:
            bound.bind(addresses)
        return GraphWork(bound, self._copies, places)

    def moved(self) -> None:
        self._launches.moved()

    def _addresses(self, places: Places) -> dict[str, int]:
        after = {
            name + OUT: places.values.get(name + OUT, address)
            for name, address in places.tensors.items()
        }
        values = {name: places.values[name] for name in (LOGITS, PICKED)}
        return {**self._constants, **places.inputs, **places.tensors, **after, **values}


class GraphWork:
    """See `edge.runtime.cuda.executor.PreparedWork`."""

    def __init__(self, bound: BoundRun, copies: Copies | None, places: Places) -> None:
        self._bound = bound
        self._copies = copies
        self._places = places

    @property
    def recordable(self) -> bool:
        return self._bound.recordable

    def issue(self) -> None:
        self._bound.enqueue()

    def finish(self, step: ReplayStep) -> None:
        if self._copies is not None:
            self._copies.issue(step, self._places)


class Copies:
    """What one state needs of it; only the memory is kept."""

    def __init__(self, state: DeviceState, device: Device) -> None:
        self._device = device
        self._memory, self._caches = state.recurrent, state.caches
        self._where, self._cache_where = state.where, state.cache_where
        self._recurrent = tuple(state.layout.recurrent)
        self._logs = tuple(state.layout.logs)
        self._rows = {
            name: (shape[0] * shape[1], shape[2], state.layout.bytes_of(name, shape[3:]))
            for name, shape in state.layout.caches.items()
        }

    def issue(self, step: ReplayStep, places: Places) -> None:
        """The stored slot, the log rows and the KV rows of the run `step`."""
        for memory, name, start, at, nbytes in self._changed(step):
            come_from = places.values[name + OUT] - places.arena.address
            self._device.copy(memory, start + at, places.arena, come_from + at, nbytes)

    def _changed(self, step: ReplayStep) -> Iterator[tuple[Memory, str, int, int, int]]:
        """(memory, tensor, where it starts there, first byte of it, bytes)."""
        if self._memory is not None:
            for name in self._recurrent if step.store != KEEP else ():
                place = self._where[name]
                yield self._memory, name, place.offset, step.target * place.slot, place.slot
            for name in self._logs:
                place = self._where[name]
                for first, count in spans(step.slots):
                    yield (
                        self._memory, name, place.offset, first * place.slot, count * place.slot
                    )  # fmt: skip
        if self._caches is not None:
            for name, (parts, capacity, row) in self._rows.items():
                for part in range(parts):
                    at = (part * capacity + step.past) * row
                    count = len(step.slots) * row
                    yield self._caches, name, self._cache_where[name].offset, at, count


def spans(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring slots as (first, how many); those below 0 are none."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            if slots[start] >= 0:
                yield slots[start], index - start
            start = index
