"""A program of a launch plan made ready for runs of one size: grids and arguments as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from edge.launch import Launch, LaunchPlan, Pointer, Size, Sizes
from edge.launch_checks import check_sizes
from edge.runtime.cuda.device import Device

# where a pointer's buffer starts
Resolve = Callable[[Pointer], int]


class KernelCall(NamedTuple):
    """One launch: `kernel` as `Device.load` gave it."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[int | float, ...]

    def issue(self, device: Device) -> None:
        device.launch(self.kernel, self.grid, self.arguments)


def choose(plan: LaunchPlan, kind: str, rows: int) -> int | None:
    """The first program for `rows` = T·B rows, as an index; None where there is none."""
    for index, program in enumerate(plan.programs):
        if program.kind == kind and (program.max_rows is None or rows <= program.max_rows):
            return index
    return None


def reads(plan: LaunchPlan, program: int) -> tuple[str, ...]:
    """Inputs that the program's launches point to, in order."""
    names: dict[str, None] = {}
    for launch in _launches(plan, program):
        for argument in launch.arguments:
            if isinstance(argument, Pointer) and argument.space == "input":
                names[argument.name] = None
    return tuple(names)


class Template:
    """A program's launches with every address filled in; only sizes are left open.

    Sizes grow with each symbol, so what is right for the largest is right for all.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        program: int,
        largest: Sizes,
        kernels: Mapping[int, Any],
        resolve: Resolve,
    ) -> None:
        """`kernels` are by variant. Raises BundleError for sizes that a launch cannot take."""
        check_sizes(plan, plan.programs[program], largest)
        self._sizes: dict[tuple[int, str, int], tuple[int, Size]] = {}
        self._open = [self._launch(launch, kernels, resolve) for launch in _launches(plan, program)]

    def _launch(self, launch: Launch, kernels: Mapping[int, Any], resolve: Resolve) -> _Open:
        fixed: list[int | float] = []
        holes = []
        for position, argument in enumerate(launch.arguments):
            if isinstance(argument, Size):
                holes.append((position, self._index(argument)))
                fixed.append(0)
            else:
                fixed.append(resolve(argument) if isinstance(argument, Pointer) else argument)
        x, y, z = (self._index(size) for size in launch.grid)
        return _Open(kernels[launch.variant], (x, y, z), fixed, holes)

    def _index(self, size: Size) -> int:
        """Where its value will be; a plan has few that differ."""
        key = (size.times, size.of, size.per)
        return self._sizes.setdefault(key, (len(self._sizes), size))[0]

    def calls(self, sizes: Sizes) -> list[KernelCall]:
        """The launches at these sizes."""
        values = [size.value(sizes) for _, size in self._sizes.values()]
        made = []
        for kernel, (x, y, z), fixed, holes in self._open:
            arguments = fixed.copy()
            for position, index in holes:
                arguments[position] = values[index]
            grid = (max(1, values[x]), max(1, values[y]), max(1, values[z]))
            made.append(KernelCall(kernel, grid, tuple(arguments)))
        return made


class _Open(NamedTuple):
    """A launch: grid and `holes` of the arguments (position, index) wait for sizes."""

    kernel: Any
    grid: tuple[int, int, int]
    fixed: list[int | float]
    holes: list[tuple[int, int]]


def _launches(plan: LaunchPlan, program: int) -> Sequence[Launch]:
    return [plan.launches[index] for index in plan.programs[program].order]
