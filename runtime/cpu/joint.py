"""Joint steps: one token for each of several single-sequence states, in one run of the plan.

A run of M tokens of one sequence reads each weight once. Here its M rows are the next tokens of M
states. Launches that do not touch a state run once for all rows. Launches that do (scans,
convolutions, attention) or that read a state's position run once per state, with one row. The
kernels are unchanged, and a row's sums do not depend on the other rows, so every state gets results
bit-identical to its own step.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge.errors import EdgeError
from edge.launch import ITEM_SIZE, LOGITS, Launch, LaunchPlan, Pointer, Program, Sizes, Variant
from edge.runtime.cpu.device import CallList, CpuDevice
from edge.runtime.cuda.engine import Floats, not_finite
from edge.runtime.cuda.inputs import DeviceRun, InputBlock
from edge.runtime.cuda.launching import KernelCall, PlanExecutor, Template, reads
from edge.runtime.cuda.runs import RunKey, place
from edge.runtime.cuda.sliding import SLOTS
from edge.runtime.cuda.state import DeviceState
from edge.runtime.engine import MAX_WINDOW, JointStep, Stepped
from edge.runtime.ledger import log_slots
from edge.runtime.request import check_run
from edge.runtime.state import State
from edge.runtime.state_memory import Array

if TYPE_CHECKING:
    from edge.runtime.cpu.engine import CpuEngine

_SHARED, _PER_STATE = range(2)  # the programs of a split plan
_ROW_INPUTS = ("tokens", "rows")  # inputs that do not depend on a state's position
_FUSED_KERNEL, _CONV_KERNEL = "linear_conv.few", "linear_conv.conv"
_MAX_CACHED = 64  # cached call lists, one per (row, state)


class SplitPlan(NamedTuple):
    """A plan's chain program for few rows, split in two: launches for all rows, and per state.

    Attributes:
        plan: plan with only these two programs; added variants come last.
        order: for each launch in order, whether it runs once per state.
        program: index of the program in the original plan.
        rows: maximum number of states.
        origins: added variant → variant that it is a part of.
    """

    plan: LaunchPlan
    order: tuple[bool, ...]
    program: int
    rows: int
    origins: Mapping[int, int]


def split(plan: LaunchPlan) -> SplitPlan | None:
    """Split the chain program for few rows; None if its rows cannot belong to several states."""
    chains = [i for i, p in enumerate(plan.programs) if p.kind == "chain" and p.max_rows]
    if not chains:
        return None
    program = max(chains, key=lambda index: plan.programs[index].max_rows or 0)
    rows = plan.programs[program].max_rows or 1
    variants, launches = list(plan.variants), []
    order: list[bool] = []
    origins: dict[int, int] = {}
    for index in plan.programs[program].launches:
        launch = plan.launches[index]
        variant = plan.variants[launch.variant]
        touches_state = _touches_state(launch)
        if touches_state and not all(
            _has_row_per_token(plan, a) for a in launch.arguments if isinstance(a, Pointer)
        ):
            return None
        parts = [(touches_state, launch.variant)]
        # its product reads most of the weights, so share that part
        if variant.kernel == _FUSED_KERNEL:
            parts = [(False, len(variants)), (True, len(variants) + 1)]
            origins |= {variant_index: launch.variant for _, variant_index in parts}
            variants += [
                _with_kernel(variant, _product_kernel(variant)),
                _with_kernel(variant, _CONV_KERNEL),
            ]
        for per_state, variant_index in parts:
            order.append(per_state)
            launches.append(launch.model_copy(update={"variant": variant_index}))
    programs = tuple(
        Program(
            kind="chain", max_rows=rows,
            launches=tuple(i for i, per_state in enumerate(order) if per_state == bool(side)),
        )
        for side in (_SHARED, _PER_STATE)
    )  # fmt: skip
    split_plan = plan.model_copy(
        update={"variants": tuple(variants), "launches": tuple(launches), "programs": programs}
    )
    return SplitPlan(split_plan, tuple(order), program, rows, origins)


def _touches_state(launch: Launch) -> bool:
    """Return whether a launch touches a state or reads its position."""
    return any(
        a.space in ("state", "log", "cache") or (a.space == "input" and a.name not in _ROW_INPUTS)
        for a in launch.arguments
        if isinstance(a, Pointer)
    )


def _has_row_per_token(plan: LaunchPlan, pointer: Pointer) -> bool:
    """Return whether a value has one row per token, so that each row belongs to one state."""
    if pointer.space != "value":
        return True
    size = plan.values[pointer.name].elements
    return size.per == 1 and sorted(size.of) in (["B", "T"], ["B", "L"])


def _product_kernel(variant: Variant) -> str:
    types = dict(zip(variant.arguments, variant.types, strict=True))
    return "linear_int8.few" if types["weight"].startswith("*i8") else "linear.few"


def _with_kernel(variant: Variant, kernel: str) -> Variant:
    return variant.model_copy(update={"kernel": kernel})


class _StateCalls(NamedTuple):
    """A state, and its calls for one row."""

    state: weakref.ref[State]
    calls: CallList


class JointRuns:
    """The joint runs of an engine: inputs for the maximum number of states, and cached call lists.

    Values lie in the engine's arena.
    """

    def __init__(self, engine: CpuEngine, parts: SplitPlan) -> None:
        """Allocate some 100 kB besides the engine's arena.

        Raises EngineError if memory runs out or the kernels are of another version.
        """
        self._engine = weakref.proxy(engine)
        device, executor = engine.exclusive.device, engine.executor
        assert isinstance(device, CpuDevice) and isinstance(executor, PlanExecutor)
        self._parts, self._device, self._executor = parts, device, executor
        self._kernels = dict(executor.kernels)
        for index, origin in parts.origins.items():
            kernel = self._device.load(parts.plan.variants[index], None, b"")
            kernel[0].read_alike(executor.kernels[origin][0])
            self._kernels[index] = kernel
        program = engine.plan.programs[parts.program]
        arena = place(program, engine.plan, _sizes(parts.rows), (LOGITS,))
        self._memory, self._values = engine.arena(arena.total), arena.offsets
        self._shared = _ProgramInputs(self, _SHARED, parts.rows)
        self._state_inputs = [_ProgramInputs(self, _PER_STATE, 1) for _ in range(parts.rows)]
        values = ctypes.c_float * (parts.rows * engine.config.vocab_size)
        logits = values.from_address(self._memory.address + self._values[LOGITS])
        self._logits: Floats = np.frombuffer(memoryview(logits), np.float32).reshape(parts.rows, -1)
        self._order = list(self._calls_in_order())
        self._shared_calls: dict[int, CallList] = {}
        self._state_calls: OrderedDict[tuple[int, int], _StateCalls] = OrderedDict()
        self._last: tuple[list[weakref.ref[State]], CallList] | None = None

    def _calls_in_order(self) -> Iterator[tuple[bool, int]]:
        """Yield for each launch whether it runs once per state, and its index in its program."""
        seen = [0, 0]
        for per_state in self._parts.order:
            yield per_state, seen[per_state]
            seen[per_state] += 1

    def run(self, members: Sequence[tuple[State, DeviceRun]]) -> list[Floats]:
        """Run one token of each state and return logits [V] for each.

        They are views of the arena, which the next run overwrites. Raises EngineError if memory
        runs out.
        """
        rows, sources = self._rows([state for state, _ in members]), self._engine.sources
        in_order = sorted(zip(rows, members, strict=True), key=lambda pair: pair[0])
        states, runs = zip(*(member for _, member in in_order), strict=True)
        calls = self._calls(states)
        tokens = np.concatenate([run.tokens for run in runs])
        all_rows = DeviceRun(tokens, runs[0].step, range(len(runs)))
        sources.fill(self._shared.views(len(runs)), all_rows)
        for inputs, run in zip(self._state_inputs, runs, strict=False):
            sources.fill(inputs.views(1), run)
        calls.replay()
        return [self._logits[row] for row in rows]

    def _rows(self, states: Sequence[State]) -> list[int]:
        """Assign a row to each state, the previous one if it is still in range."""
        previous = self._last[0] if self._last else []
        previous_rows = {id(ref()): row for row, ref in enumerate(previous[: len(states)])}
        free = set(range(len(states))) - {
            previous_rows[id(s)] for s in states if id(s) in previous_rows
        }
        return [previous_rows[id(s)] if id(s) in previous_rows else free.pop() for s in states]

    def _calls(self, states: Sequence[State]) -> CallList:
        """Return the calls for states in their rows, usually those of the previous run."""
        previous, calls = self._last or ((), None)
        if calls and [id(ref()) for ref in previous] == [id(state) for state in states]:
            return calls
        count = len(states)
        if count not in self._shared_calls:
            self._shared_calls[count] = self._record(_SHARED, states[0], 0, count)
        per_state = [self._calls_for(state, row) for row, state in enumerate(states)]
        merged = self._device.weave(self._shared_calls[count], per_state, self._order)
        self._last = [weakref.ref(state) for state in states], merged
        return merged

    def _calls_for(self, state: State, row: int) -> CallList:
        key = row, id(state)
        cached = self._state_calls.get(key)
        # a new state may have the id of one that was freed
        if cached is None or cached.state() is not state:
            calls = self._record(_PER_STATE, state, row, 1)
            cached = self._state_calls[key] = _StateCalls(weakref.ref(state), calls)
        self._state_calls.move_to_end(key)
        if len(self._state_calls) > _MAX_CACHED:
            self._state_calls.popitem(last=False)
        return cached.calls

    def _record(self, program: int, state: State, row: int, rows: int) -> CallList:
        with self._device.record() as graphs:
            for call in self._launches(program, state, row, rows):
                call.issue(self._device)
        calls = graphs[0]
        assert isinstance(calls, CallList)
        return calls

    def _launches(self, program: int, state: State, row: int, rows: int) -> list[KernelCall]:
        """Return the launches of one of the two programs for `rows` rows from `row` on."""
        plan, executor = self._parts.plan, self._executor
        runs = state.workspace.runs
        inputs = self._state_inputs[row] if program == _PER_STATE else self._shared
        single_row = runs.sizes(RunKey(self._parts.program, 1, 1))
        sizes = runs.sizes(RunKey(self._parts.program, rows, rows))

        def value(name: str) -> int:
            buffer = plan.values[name]
            offset = row * buffer.elements.value(single_row) * ITEM_SIZE[buffer.dtype]
            return self._memory.address + self._values[name] + offset

        starts: dict[str, Callable[[str], int]] = {
            "value": value,
            "input": inputs.address,
            "weight": executor.weights.address,
            "inline": executor.weights.inline,
        }

        def resolve(pointer: Pointer) -> int:
            start = starts.get(pointer.space, state.workspace.addresses.__getitem__)
            return start(pointer.name) + pointer.at * executor.item_size(pointer, runs.layout)

        return Template(plan, program, sizes, self._kernels, resolve).calls(sizes)


class _ProgramInputs:
    """The inputs that the host writes before the launches of one of the two programs."""

    def __init__(self, joint: JointRuns, program: int, rows: int) -> None:
        engine, plan = joint._engine, joint._parts.plan
        self._block = InputBlock(
            {name: plan.inputs[name] for name in reads(plan, program)}, _sizes(rows)
        )
        self._memory = engine.exclusive.device.host(max(1, self._block.nbytes))
        self._per_state = program == _PER_STATE
        self._views: dict[int, dict[str, Array]] = {}

    def address(self, name: str) -> int:
        return int(self._memory.ctypes.data) + self._block.offsets[name]

    def views(self, rows: int) -> dict[str, Array]:
        if rows not in self._views:
            views = self._block.views(self._memory, _sizes(rows))
            # a pair's product takes its convolution's inputs as arguments but does not read them
            needed = (
                views if self._per_state else {n: v for n, v in views.items() if n in _ROW_INPUTS}
            )
            self._views[rows] = needed
        return self._views[rows]


def _sizes(rows: int) -> Sizes:
    """Return the sizes for `rows` rows of one sequence and the largest window."""
    return {"T": rows, "B": 1, "L": rows, "C": 1, "S": log_slots(MAX_WINDOW), SLOTS: 1}


def step_jointly(engine: CpuEngine, joint: JointRuns, steps: Sequence[JointStep]) -> list[Stepped]:
    results: dict[int, Stepped] = {}
    runs: dict[int, DeviceRun] = {}
    frame = sys._getframe()
    try:
        for index, step in enumerate(steps):
            try:
                step.state.hold.take(frame)
            except EdgeError as problem:
                results[index] = problem
                continue
            try:
                runs[index] = _check_step(engine, step)
            except EdgeError as problem:
                results[index] = problem
                step.state.hold.release()
        if runs:
            with engine.exclusive:
                logits = joint.run([(steps[index].state, run) for index, run in runs.items()])
                for row, index in zip(logits, runs, strict=True):
                    results[index] = _finish_step(steps[index], row, runs[index])
    finally:
        for index in runs:
            steps[index].state.hold.release()
    return [results[index] for index in range(len(steps))]


def _check_step(engine: CpuEngine, step: JointStep) -> DeviceRun:
    state = step.state
    request = check_run(engine, [[step.token]], state)
    assert isinstance(state, DeviceState)
    state.ledger = state.ledger.with_room(1)
    if state.layout.slots is not None:
        state.make_room(1)
    return DeviceRun(request.tokens, state.ledger.run(1), (0,), state.ledger.first)


def _finish_step(step: JointStep, row: Floats, run: DeviceRun) -> Stepped:
    """Return the result from a state's row of logits, and advance the state's ledger."""
    result: Stepped
    if step.greedy:
        result = int(row.argmax())
        finite = not np.isnan(row[result])
    else:
        finite = bool(np.isfinite(row).all())
        result = step.state.workspace.own(row)
    if not finite:
        return not_finite()
    step.state.ledger = run.step.after
    return result
