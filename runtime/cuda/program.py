"""A program of a launch plan made ready for runs of one size: grids and arguments as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from edge.launch import Launch, LaunchPlan, Pointer, Size, Sizes
from edge.launch_checks import check_sizes
from edge.runtime.cuda.device import Device

# where a pointer's buffer starts
Resolve = Callable[[Pointer], int]


class Call(NamedTuple):
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


def bind(
    plan: LaunchPlan, program: int, sizes: Sizes, kernels: Mapping[int, Any], resolve: Resolve
) -> list[Call]:
    """The program's launches for these sizes. `kernels` are by variant.

    Raises BundleError for sizes that a launch of it cannot take.
    """
    check_sizes(plan, plan.programs[program], sizes)
    calls = []
    for launch in _launches(plan, program):
        x, y, z = (max(1, size.value(sizes)) for size in launch.grid)
        arguments = tuple(
            argument.value(sizes) if isinstance(argument, Size)
            else resolve(argument) if isinstance(argument, Pointer)
            else argument
            for argument in launch.arguments
        )  # fmt: skip
        calls.append(Call(kernels[launch.variant], (x, y, z), arguments))
    return calls


def _launches(plan: LaunchPlan, program: int) -> Sequence[Launch]:
    return [plan.launches[index] for index in plan.programs[program].launches]
