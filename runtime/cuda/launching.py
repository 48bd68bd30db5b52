"""The CUDA engine's executor: a program of the launch plan, one launch after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.launch import ITEM_SIZE, Buffer, LaunchPlan, Pointer
from edge.runtime.cuda import program
from edge.runtime.cuda.arena import Arena, place
from edge.runtime.cuda.device import Device
from edge.runtime.cuda.executor import Places
from edge.runtime.cuda.runs import RunKey, StateRuns
from edge.runtime.cuda.state import DeviceState
from edge.runtime.cuda.weights import DeviceWeights
from edge.runtime.layout import StateLayout
from edge.runtime.ledger import ReplayStep


class PlanExecutor:
    """See `executor.Executor`.

    Attributes:
        plan, kernels: what is launched; kernels by variant.
        weights: the constants.
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

    def inputs(self, index: int) -> Mapping[str, Buffer]:
        """Those that the program's launches point to."""
        return {name: self.plan.inputs[name] for name in program.reads(self.plan, index)}

    def values(self, runs: StateRuns, roomy: RunKey) -> Arena:
        """Those that its launches hand to one another."""
        return place(self.plan.programs[roomy.program], self.plan, runs.sizes(roomy))

    def check(self, runs: StateRuns) -> None:
        """A plan is made for every size."""

    def issuer(self, runs: StateRuns, state: DeviceState) -> LaunchIssuer:
        return LaunchIssuer(self, runs)

    def item_size(self, pointer: Pointer, layout: StateLayout) -> int:
        """Bytes of one element of what it points to."""
        if pointer.space in ("state", "cache"):
            return layout.dtype(pointer.name).itemsize
        return ITEM_SIZE[self._tables[pointer.space][pointer.name].dtype]


class LaunchIssuer:
    """See `executor.Issuer`. Addresses are filled into a program once for all lengths."""

    rehearses = False

    def __init__(self, executor: PlanExecutor, runs: StateRuns) -> None:
        self._executor = executor
        self._runs = runs
        self._templates: dict[RunKey, program.Template] = {}

    def prepare(self, key: RunKey, places: Places, *, recorded: bool) -> Launches:
        """See `Issuer.prepare`."""
        roomy = self._runs.roomy(key)
        if roomy not in self._templates:
            self._templates[roomy] = self._template(roomy, places)
        calls = self._templates[roomy].calls(self._runs.sizes(key))
        if not key.picked:
            calls = calls[: len(self._executor.plan.programs[key.program].launches)]
        return Launches(self._executor.device, calls)

    def moved(self) -> None:
        self._templates.clear()

    def _template(self, roomy: RunKey, places: Places) -> program.Template:
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

        sizes = self._runs.sizes(roomy)
        return program.Template(executor.plan, roomy.program, sizes, executor.kernels, resolve)


class Launches:
    """See `executor.Work`.

    Attributes:
        calls: in order.
    """

    recordable = True

    def __init__(self, device: Device, calls: list[program.KernelCall]) -> None:
        self._device = device
        self.calls = calls

    def issue(self) -> None:
        for call in self.calls:
            call.issue(self._device)

    def finish(self, step: ReplayStep) -> None:
        """Its launches read all that differs from the inputs."""
