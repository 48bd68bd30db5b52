"""The CUDA engine's executor: issues the launches of a launch plan's program in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from edge.launch import ITEM_SIZE, Buffer, Launch, LaunchPlan, Pointer, Size, Sizes
from edge.launch_checks import check_sizes
from edge.runtime.cuda.device import Device
from edge.runtime.cuda.executor import Places
from edge.runtime.cuda.runs import Arena, RunKey, StateRuns, place
from edge.runtime.cuda.state import DeviceState
from edge.runtime.cuda.weights import DeviceWeights
from edge.runtime.layout import StateLayout
from edge.runtime.ledger import state_slots


class PlanExecutor:
    """Executor of a launch plan; see `executor.Executor`.

    Attributes:
        plan: the launch plan.
        kernels: loaded kernels by variant index.
        weights: weights and inline constants in device memory.
    """

    scratch_bytes = 0
    trees = True

    def __init__(
        self, plan: LaunchPlan, kernels: Mapping[int, Any], weights: DeviceWeights, device: Device
    ) -> None:
        self.plan = plan
        self.kernels = kernels
        self.weights = weights
        self.device = device
        self._tables: Mapping[str, Mapping[str, Any]] = {
            "value": plan.values,
            "input": plan.inputs,
            "weight": plan.weights,
            "inline": plan.inline,
            "log": plan.logs,
        }

    @property
    def weights_bytes(self) -> int:
        return self.weights.nbytes

    def state_slots(self, window: int) -> int:
        """Return the number of slots worth having; the kernels take any number."""
        return state_slots(window)

    def inputs(self, index: int) -> Mapping[str, Buffer]:
        """Return the inputs that the program's launches point to."""
        return {name: self.plan.inputs[name] for name in reads(self.plan, index)}

    def values(self, runs: StateRuns, spacious: RunKey) -> Arena:
        """Place the values that the program's launches pass to one another."""
        return place(self.plan.programs[spacious.program], self.plan, runs.sizes(spacious))

    def check(self, runs: StateRuns) -> None:
        """Accept every state: a plan runs at any size."""

    def issuer(self, runs: StateRuns, state: DeviceState) -> LaunchIssuer:
        return LaunchIssuer(self, runs)

    def item_size(self, pointer: Pointer, layout: StateLayout) -> int:
        """Return the bytes of one element of the pointer's buffer."""
        if pointer.space in ("state", "cache"):
            return layout.dtype(pointer.name).itemsize
        return ITEM_SIZE[self._tables[pointer.space][pointer.name].dtype]


class LaunchIssuer:
    """See `executor.Issuer`. A program's addresses are resolved once for all lengths."""

    def __init__(self, executor: PlanExecutor, runs: StateRuns) -> None:
        self._executor = executor
        self._runs = runs
        self.rehearses = not executor.device.records_early
        self._templates: dict[RunKey, Template] = {}

    def prepare(self, key: RunKey, places: Places, *, recorded: bool) -> Launches:
        spacious = self._runs.spacious(key)
        if spacious not in self._templates:
            self._templates[spacious] = self._template(spacious, places)
        calls = self._templates[spacious].calls(self._runs.sizes(key))
        if not key.picked:
            calls = calls[: len(self._executor.plan.programs[key.program].launches)]
        return Launches(self._executor.device, calls)

    def moved(self) -> None:
        self._templates.clear()

    def _template(self, spacious: RunKey, places: Places) -> Template:
        executor, layout = self._executor, self._runs.layout
        starts = {
            "value": places.values.__getitem__,
            "input": places.inputs.__getitem__,
            "weight": executor.weights.address,
            "inline": executor.weights.inline,
        }

        def resolve(pointer: Pointer) -> int:
            start = starts.get(pointer.space, places.tensors.__getitem__)
            return start(pointer.name) + pointer.at * executor.item_size(pointer, layout)

        sizes = self._runs.sizes(spacious)
        return Template(executor.plan, spacious.program, sizes, executor.kernels, resolve)


class Launches:
    """The launches of one run; see `executor.PreparedWork`.

    Attributes:
        calls: kernel launches in order.
    """

    recordable = True
    finish = None  # whatever differs from run to run is in the inputs

    def __init__(self, device: Device, calls: list[KernelCall]) -> None:
        self._device = device
        self.calls = calls

    def issue(self) -> None:
        for call in self.calls:
            call.issue(self._device)


# the device address of a pointer
Resolve = Callable[[Pointer], int]


class KernelCall(NamedTuple):
    """One launch of a `kernel` from `Device.load`."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[int | float, ...]

    def issue(self, device: Device) -> None:
        device.launch(self.kernel, self.grid, self.arguments)


def reads(plan: LaunchPlan, program: int) -> tuple[str, ...]:
    """Return the names of the inputs that the program's launches point to, in order."""
    names: dict[str, None] = {}
    for launch in _launches(plan, program):
        for argument in launch.arguments:
            if isinstance(argument, Pointer) and argument.space == "input":
                names[argument.name] = None
    return tuple(names)


class Template:
    """A program's launches with every address filled in; only sizes are left open.

    Sizes grow with each symbol, so addresses and checks for the largest run hold for all.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        program: int,
        largest: Sizes,
        kernels: Mapping[int, Any],
        resolve: Resolve,
    ) -> None:
        """Resolve all addresses. `kernels` are keyed by variant index.

        Raises BundleError if a launch does not support the `largest` sizes.
        """
        check_sizes(plan, plan.programs[program], largest)
        self._sizes: dict[tuple[int, str, int], tuple[int, Size]] = {}
        self._open_launches = [
            self._open_launch(launch, kernels, resolve) for launch in _launches(plan, program)
        ]

    def _open_launch(
        self, launch: Launch, kernels: Mapping[int, Any], resolve: Resolve
    ) -> _OpenLaunch:
        fixed: list[int | float] = []
        holes = []
        for position, argument in enumerate(launch.arguments):
            if isinstance(argument, Size):
                holes.append((position, self._index(argument)))
                fixed.append(0)
            else:
                fixed.append(resolve(argument) if isinstance(argument, Pointer) else argument)
        x, y, z = (self._index(size) for size in launch.grid)
        return _OpenLaunch(kernels[launch.variant], (x, y, z), fixed, holes)

    def _index(self, size: Size) -> int:
        """Return the index of the size's value; a plan has few distinct sizes."""
        key = (size.times, size.of, size.per)
        return self._sizes.setdefault(key, (len(self._sizes), size))[0]

    def calls(self, sizes: Sizes) -> list[KernelCall]:
        """Return the launches at these sizes."""
        values = [size.value(sizes) for _, size in self._sizes.values()]
        calls = []
        for kernel, (x, y, z), fixed, holes in self._open_launches:
            arguments = fixed.copy()
            for position, index in holes:
                arguments[position] = values[index]
            grid = (max(1, values[x]), max(1, values[y]), max(1, values[z]))
            calls.append(KernelCall(kernel, grid, tuple(arguments)))
        return calls


class _OpenLaunch(NamedTuple):
    """A launch with open sizes: `grid` and `holes` (argument position, index) index size values."""

    kernel: Any
    grid: tuple[int, int, int]
    fixed: list[int | float]
    holes: list[tuple[int, int]]


def _launches(plan: LaunchPlan, program: int) -> Sequence[Launch]:
    return [plan.launches[index] for index in plan.programs[program].order]
