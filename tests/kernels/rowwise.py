"""Run the launches of a lowering on tensors, where `tests.on_device` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edge.launch import DType, Launch, Pointer, Weight
from edge.plugins.lowering.context import (
    Constant,
    Lower,
    Lowering,
    Node,
    Regime,
    Rows,
    Tables,
    View,
)
from edge.plugins.lowering.graph import bound
from edge.runtime.cuda.device import Device
from tests.on_device import device_with

# (space, name) → a whole buffer
Buffers = dict[tuple[str, str], Tensor]
_DTYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i32": torch.int32,
    "i64": torch.int64,
}
_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in _DTYPES.items()}  # type: ignore[misc]
_GUARD = 64  # poisoned elements after every buffer, which reveal a write past the end
CHAIN, MANY, TREE = Regime("chain", 16), Regime("chain", None), Regime("tree", 16)


def poisoned(count: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of NaN, or of 0x7f in every byte."""
    if dtype.is_floating_point:
        return torch.full((count,), float("nan"), dtype=dtype)
    return torch.full((count * dtype.itemsize,), 0x7F, dtype=torch.uint8).view(dtype)


class Workbench:
    """One program: set values and constants, lower nodes, run, inspect every buffer.

    Attributes:
        sizes: sizes of T, B, L, C, S.
        memory: (space, name) → the whole buffer, poisoned where nothing was written.
    """

    def __init__(self, regime: Regime, **sizes: int) -> None:
        self.sizes = {"T": 1, "B": 1, "L": 1, "C": 1, "S": 1} | sizes
        self.memory: Buffers = {}
        self.constants: dict[str, Constant] = {}
        self.tables = Tables()
        self.lowering = Lowering(regime, self.tables, self.constants)

    def value(self, name: str, x: Tensor, stride: int = 0, start: int = 0) -> None:
        """Set x [rows, width] as channels `start` … of a buffer whose rows are `stride` long."""
        count, width = x.shape
        stride = stride or width
        rows: Rows = "TB" if count == self.sizes["T"] * self.sizes["B"] else "LB"
        whole = poisoned(count * stride + _GUARD, x.dtype)
        whole[: count * stride].view(count, stride)[:, start : start + width] = x
        self.memory["value", name] = whole
        self.lowering.views[name] = View(name, _NAMES[x.dtype], rows, width, stride, start)

    def constant(self, name: str, array: Tensor) -> None:
        dtype = _NAMES[array.dtype]
        self.tables.weights[name] = Weight(dtype=dtype, offset=0, elements=array.numel())
        self.constants[name] = Constant(name, "weight", dtype, tuple(array.shape), array.numpy)
        self.memory["weight", name] = _guarded(array)

    def given(self, space: str, name: str, x: Tensor) -> None:
        """Set a whole input, cache, state or log."""
        self.memory[space, name] = _guarded(x)

    def lower(
        self,
        table: Mapping[str, Lower],
        op: str,
        inputs: tuple[str, ...] | Mapping[str, str],
        outputs: tuple[str, ...] | Mapping[str, str],
        **attributes: Any,
    ) -> None:
        """Lower a node, with values by the statement's names or in its order."""
        if isinstance(inputs, tuple) and isinstance(outputs, tuple):
            node = bound(op, outputs[0], inputs, outputs, attributes)
        else:
            into = inputs if isinstance(inputs, Mapping) else {name: name for name in inputs}
            out = outputs if isinstance(outputs, Mapping) else {name: name for name in outputs}
            node = Node(op, next(iter(out.values())), into, out, attributes)
        table[op](self.lowering, node)

    def run(self) -> None:
        launches = {number: launch for number, launch in self.tables.launches.values()}
        variants = {number: variant for number, variant in self.tables.variants.values()}
        device, loaded = device_with(variants.values())
        kernels = dict(zip(variants, loaded, strict=True))
        calls = [launches[number] for number in self.lowering.order]
        buffers = _Buffers(device, self._read_or_written(calls))
        for launch in calls:
            arguments = [
                buffers.address(argument) if isinstance(argument, Pointer)
                else argument if isinstance(argument, float) else argument.value(self.sizes)
                for argument in launch.arguments
            ]  # fmt: skip
            x, y, z = (max(1, size.value(self.sizes)) for size in launch.grid)
            device.launch(kernels[launch.variant], (x, y, z), arguments)
        self.memory |= buffers.back()
        for (space, name), whole in self.memory.items():
            guard = whole[-_GUARD:]
            same = guard.isnan() if guard.is_floating_point() else guard == poisoned(1, guard.dtype)
            assert bool(same.all()), f"{space} {name} is written past its end"

    def _read_or_written(self, calls: list[Launch]) -> Buffers:
        """Return what the launches point to; values that were not set are poison."""
        found: Buffers = {}
        for pointer in (a for launch in calls for a in launch.arguments if isinstance(a, Pointer)):
            key = (pointer.space, pointer.name)
            if key not in self.memory:
                assert pointer.space == "value", f"the test gives no {key}"
                buffer = self.tables.values[pointer.name]
                count = buffer.elements.value(self.sizes)
                self.memory[key] = poisoned(count + _GUARD, _DTYPES[buffer.dtype])
            found[key] = self.memory[key]
        return found

    def read(self, name: str) -> Tensor:
        """Return a copy of a value's rows [rows, width]."""
        view = self.lowering.views[name]
        count = self.sizes[view.rows[0]] * self.sizes["B"]
        rows = self.memory["value", view.buffer][: count * view.stride].view(count, view.stride)
        return rows[:, view.offset : view.offset + view.width].clone()

    def whole(self, space: str, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.memory[space, name][: int(np.prod(shape))].view(shape).clone()


class _Buffers:
    """Copies in device memory, one Memory each."""

    def __init__(self, device: Device, given: Buffers) -> None:
        self._device, self._given = device, given
        self._there = {}
        for key, whole in given.items():
            stage = device.host(whole.nbytes)
            stage[:] = whole.view(torch.uint8).numpy()
            self._there[key] = device.allocate(whole.nbytes)
            device.write(self._there[key], 0, stage)
        device.wait()

    def address(self, pointer: Pointer) -> int:
        key = (pointer.space, pointer.name)
        return self._there[key].address + pointer.at * self._given[key].itemsize

    def back(self) -> Buffers:
        """Copy everything back after the run."""
        stages = {}
        for key, memory in self._there.items():
            stages[key] = self._device.host(memory.nbytes)
            self._device.read(stages[key], memory, 0)
        self._device.wait()
        return {
            key: torch.from_numpy(stage.copy()).view(self._given[key].dtype)
            for key, stage in stages.items()
        }


def _guarded(x: Tensor) -> Tensor:
    return torch.cat([x.reshape(-1), poisoned(_GUARD, x.dtype)])


def assert_steps(found: Tensor, expected: Tensor) -> None:
    """Check int8 results: at most one step apart, on at most 1 value in 10,000 (or one value)."""
    apart = (found.int() - expected.int()).abs()
    assert found.shape == expected.shape and int(apart.max()) <= 1
    assert int((apart > 0).sum()) <= max(1, found.numel() // 10_000)
