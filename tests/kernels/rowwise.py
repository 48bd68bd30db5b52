"""Runs what a lowering launches, on tensors, through Triton's interpreter.

With EDGE_TEST_DEVICE=cuda the kernels are compiled and run on a GPU instead (tests/gpu/run.sh).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edge.launch import DType, Pointer, Variant, Weight
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

_DTYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i32": torch.int32,
    "i64": torch.int64,
}
_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in _DTYPES.items()}  # type: ignore[misc]
DEVICE = os.environ.get("EDGE_TEST_DEVICE", "cpu")
_GUARD = 64  # poisoned elements after every buffer: a write past the end shows
CHAIN, MANY, TREE = Regime("chain", 16), Regime("chain", None), Regime("tree", 16)


def poisoned(count: int, dtype: torch.dtype) -> Tensor:
    """NaN, or 0x7f in every byte."""
    if dtype.is_floating_point:
        return torch.full((count,), float("nan"), dtype=dtype)
    return torch.full((count * dtype.itemsize,), 0x7F, dtype=torch.uint8).view(dtype)


class Workbench:
    """One program: give it values and constants, lower nodes, run, look at every buffer.

    Attributes:
        sizes: of T, B, L, C, S.
        memory: (space, name) → the whole buffer, poisoned where nothing was written.
    """

    def __init__(self, regime: Regime, **sizes: int) -> None:
        self.sizes = {"T": 1, "B": 1, "L": 1, "C": 1, "S": 1} | sizes
        self.memory: dict[tuple[str, str], Tensor] = {}
        self._there: dict[tuple[str, str], Tensor] = {}  # the same on the device, during a run
        self.constants: dict[str, Constant] = {}
        self.tables = Tables()
        self.lowering = Lowering(regime, self.tables, self.constants)

    def value(self, name: str, x: Tensor, stride: int = 0, start: int = 0) -> None:
        """x [rows, width] as channels `start` … of a buffer whose rows are `stride` long."""
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
        """An input, cache, state or log, whole."""
        self.memory[space, name] = _guarded(x)

    def lower(
        self,
        table: Mapping[str, Lower],
        op: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        **attributes: Any,
    ) -> None:
        table[op](self.lowering, Node(op, outputs[0], inputs, outputs, attributes))

    def run(self) -> None:
        for index in self.lowering.order:
            launch = next(x for n, x in self.tables.launches.values() if n == index)
            variant = next(v for n, v in self.tables.variants.values() if n == launch.variant)
            module, function = variant.kernel.split(".")
            kernel = getattr(importlib.import_module(f"edge.plugins.kernels.{module}"), function)
            arguments = [
                self._at(argument) if isinstance(argument, Pointer)
                else argument if isinstance(argument, float) else argument.value(self.sizes)
                for argument in launch.arguments
            ]  # fmt: skip
            grid = tuple(max(1, size.value(self.sizes)) for size in launch.grid)
            named = dict(zip(variant.arguments, arguments, strict=True))
            kernel[grid](**named, **variant.constants, **_options(variant))
        self.memory |= {key: whole.cpu() for key, whole in self._there.items()}
        self._there.clear()
        for (space, name), whole in self.memory.items():
            guard = whole[-_GUARD:]
            same = guard.isnan() if guard.is_floating_point() else guard == poisoned(1, guard.dtype)
            assert bool(same.all()), f"{space} {name} is written past its end"

    def _at(self, pointer: Pointer) -> Tensor:
        key = (pointer.space, pointer.name)
        if key not in self.memory:
            assert pointer.space == "value", f"the test gives no {key}"
            buffer = self.tables.values[pointer.name]
            count = buffer.elements.value(self.sizes)
            self.memory[key] = poisoned(count + _GUARD, _DTYPES[buffer.dtype])
        if key not in self._there:
            self._there[key] = self.memory[key].to(DEVICE)
        return self._there[key][pointer.at :]

    def read(self, name: str) -> Tensor:
        """A value's rows [rows, width], a copy."""
        view = self.lowering.views[name]
        count = self.sizes[view.rows[0]] * self.sizes["B"]
        rows = self.memory["value", view.buffer][: count * view.stride].view(count, view.stride)
        return rows[:, view.offset : view.offset + view.width].clone()

    def whole(self, space: str, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.memory[space, name][: int(np.prod(shape))].view(shape).clone()


def _options(variant: Variant) -> dict[str, Any]:
    """How a compiled kernel is made; the interpreter has no such choices."""
    if DEVICE == "cpu":
        return {}
    return {
        "num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": False
    }  # fmt: skip


def _guarded(x: Tensor) -> Tensor:
    return torch.cat([x.reshape(-1), poisoned(_GUARD, x.dtype)])


def assert_steps(found: Tensor, expected: Tensor) -> None:
    """int8 results: at most one step apart, on at most 1 value in 10,000 (or one value)."""
    apart = (found.int() - expected.int()).abs()
    assert found.shape == expected.shape and int(apart.max()) <= 1
    assert int((apart > 0).sum()) <= max(1, found.numel() // 10_000)
