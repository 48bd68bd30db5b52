"""Executor of the device graph: one call of the built engine does a whole run.

TensorRT runs the graph (`contexts`); tests use ONNX Runtime in its place. A run without tokens that
only applies a state's log (`settle`) is still launched from the plan, because no profile allows
zero tokens.
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
    """Runs the device graph; see `edge.runtime.cuda.executor.Executor`.

    Attributes:
        launches: executor of the runs that the graph cannot do.
        sizes: maximum sizes that the engine was built for.
        contexts: execution contexts of the engine.
        constants: addresses of the weights in device memory, by name.
    """

    def __init__(
        self,
        launches: PlanExecutor,
        contexts: EngineContexts,
        sizes: EngineSizes,
        rebuild: Callable[[EngineSizes], str],
    ) -> None:
        """`rebuild` returns the command that builds the engine for other sizes."""
        self.launches = launches
        self.sizes = sizes
        self.contexts = contexts
        self._rebuild = rebuild
        # weights that are not in the engine are its inputs
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
        """Bytes of the engine's weights and of those in device memory."""
        return self.contexts.weights_bytes + self.launches.weights_bytes

    @property
    def trees(self) -> bool:
        return self.contexts.trees

    @property
    def scratch_bytes(self) -> int:
        return self.contexts.scratch_bytes

    def inputs(self, program: int) -> Mapping[str, Buffer]:
        """Return the inputs of a program; for the graph, all of them."""
        return self._inputs[program]

    def state_slots(self, window: int) -> int:
        """Return 2, the number of slots of the graph's inputs."""
        return 2

    def values(self, runs: StateRuns, spacious: RunKey) -> Arena:
        """Place the graph's outputs that are not written in place."""
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
        """Raise EngineError if the engine is too small for such states, with the build command."""
        required = EngineSizes(
            window=runs.window,
            batch=runs.batch,
            capacity=runs.layout.capacity,
            chunk=runs.chunk,
        )
        if self.sizes.covers(required):
            return
        faults, larger_sizes, current = Faults(), {}, self.sizes.model_dump()
        for name, value in required.model_dump().items():
            larger_sizes[name] = max(value, current[name])
            if value > current[name]:
                faults.add(name, f"is {value}, the engine was built for at most {current[name]}")
        command = self._rebuild(EngineSizes(**larger_sizes))
        faults.refuse(EngineError, remedy=f"build it for larger sizes: {command}")

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
        self._recorded_runs: dict[RunKey, BoundRun] = {}

    def prepare(self, key: RunKey, places: Places, *, recorded: bool) -> PreparedWork:
        if self._runs.plan.programs[key.program].kind == "settle":
            return self._launches.prepare(key, places, recorded=recorded)
        # every run computes the picked ids too, so a run of the same size serves both
        base_key = key._replace(picked=False)
        addresses = self._addresses(places)
        bound = self._recorded_runs.get(base_key)
        if bound is None:
            run = GraphRun(symbols(self._runs, key), shapes(self._runs, key), addresses)
            bound = self.contexts.bound(run, own=recorded)
            if recorded:
                self._recorded_runs[base_key] = bound
        else:
            bound.bind(addresses)
        return GraphWork(bound, self._copies, places)

    def moved(self) -> None:
        self._launches.moved()

    def _addresses(self, places: Places) -> dict[str, int]:
        outputs = {
            name + OUT: places.values.get(name + OUT, address)
            for name, address in places.tensors.items()
        }
        values = {name: places.values[name] for name in (LOGITS, PICKED)}
        return {**self._constants, **places.inputs, **places.tensors, **outputs, **values}


class GraphWork:
    """See `edge.runtime.cuda.executor.PreparedWork`. `bound`: the run of TensorRT's engine."""

    def __init__(self, bound: BoundRun, copies: Copies | None, places: Places) -> None:
        self.bound = bound
        self._copies = copies
        self._places = places

    @property
    def recordable(self) -> bool:
        return self.bound.recordable

    def issue(self) -> None:
        self.bound.enqueue()

    def finish(self, step: ReplayStep) -> None:
        if self._copies is not None:
            self._copies.issue(step, self._places)


class Copies:
    """Copies outputs back into a state when the graph does not write in place.

    Keeps references to the state's memory only, not to the state.
    """

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
        """Issue copies of the stored slot, the log rows and the KV rows of the run `step`."""
        for memory, name, start, at, nbytes in self._changed(step):
            source = places.values[name + OUT] - places.arena.address
            self._device.copy(memory, start + at, places.arena, source + at, nbytes)

    def _changed(self, step: ReplayStep) -> Iterator[tuple[Memory, str, int, int, int]]:
        """Yield (memory, tensor, tensor's offset there, first changed byte in it, byte count)."""
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
    """Yield runs of consecutive slots as (first, count), skipping negative ones."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            if slots[start] >= 0:
                yield slots[start], index - start
            start = index
