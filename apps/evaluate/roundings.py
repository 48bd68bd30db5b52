"""Find every activation, weight and state that a bundle's graph rounds.

The nodes of the graph are the source, not the recipe, so the result is what runs. Names are those
of the floating graph: a value `V` is rounded to `V.q`, or to `V.rounded` and dequantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from edge.errors import InputError
from edge.export.quantize.weights import dequantize_blocks, dequantize_int8
from edge.ops import DOMAIN, Op
from edge.plugins.hadamard.reference import hadamard
from edge.plugins.onnx.library import inputs_of, op_of
from edge.plugins.quantize.reference import (
    dequantize,
    fake_quantize,
    fake_quantize_rows,
    split_quantize_rows,
)

F32 = NDArray[np.float32]
# a scale above this keeps its column out of the int8 product, in a floating-point one
NEVER = 1e29
_ENDINGS = (".q", ".turned", ".rotated")

# an op with one of these in its name rounds something, so this module must know it
_ROUNDING_WORDS = ("Int8", "Int4", "Quantize", "Bits")


def _is_product(op: Op) -> bool:
    return op.name.startswith("Linear")


def _rounded_inputs(op: Op) -> list[tuple[str, str | None]]:
    """Return inputs that `op` rounds or reads rounded, with their scales; None is one per row."""
    names = {v.name for v in op.inputs}
    if _is_product(op):
        return []
    if op.name.endswith(("Quantize", "QuantizeRows")) and "weight" not in names:
        return [("x", "scale" if "scale" in names else None)]
    values = (v.name for v in op.inputs if v.role == "value")
    return [(name, f"{name}_scale") for name in values if f"{name}_scale" in names]


@dataclass(frozen=True)
class ValueRounding:
    """Rounding of a value to int8.

    Attributes:
        scale: f32 [1] or [C]; None for one scale per row, computed at run time.
        turn: factors slow and fast of the rotation applied before rounding, or None.
        threshold: with scales per row, the magnitude from which values stay floating, or None.
    """

    scale: Tensor | None
    turn: tuple[Tensor, Tensor] | None = None
    threshold: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Quantize and dequantize x, fp32 [..., C]. Columns that stay floating are unchanged."""
        if self.turn is None:
            return self._round(x)
        slow, fast = self.turn
        return hadamard(self._round(hadamard(x, slow, fast)), slow.T, fast.T)

    def _round(self, x: Tensor) -> Tensor:
        if self.scale is None:
            if self.threshold is None:
                return fake_quantize_rows(x)
            y, scale, outliers = split_quantize_rows(x, self.threshold)
            return dequantize(y, scale) + outliers
        rounded = fake_quantize(x, self.scale)
        return torch.where(self.scale > NEVER, x, rounded)


@dataclass
class StateRounding:
    """Rounding of a scan's state between tokens. `bits`: 16, or 8 with a scale."""

    bits: int
    scale: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        """Return the fp32 state that the next token reads."""
        if self.bits == 16:
            return h.to(torch.float16).float()
        return torch.round(h / self.scale).clamp(-128, 127) * self.scale


@dataclass
class Found:
    """Everything that a graph rounds.

    Attributes:
        values: rounding by value.
        weights: stored weight, dequantized to fp32, by initializer of the floating graph.
        states: rounding by state, `layers.N.ssm_states`.
    """

    values: dict[str, ValueRounding] = field(default_factory=dict)
    weights: dict[str, F32] = field(default_factory=dict)
    states: dict[str, StateRounding] = field(default_factory=dict)


class Initializers(Mapping[str, NDArray[Any]]):
    """Constants of a graph by name, read on access."""

    def __init__(self, model: ModelProto, folder: Path) -> None:
        self._protos: dict[str, TensorProto] = {t.name: t for t in model.graph.initializer}
        self._folder = folder

    def __getitem__(self, name: str) -> NDArray[Any]:
        return numpy_helper.to_array(self._protos[name], base_dir=str(self._folder))

    def __iter__(self) -> Iterator[str]:
        return iter(self._protos)

    def __len__(self) -> int:
        return len(self._protos)


def find(model: ModelProto, folder: Path, floating: Mapping[str, NDArray[Any]]) -> Found:
    """Return everything that `model` rounds and the graph with constants `floating` does not."""
    finder = _Finder(Initializers(model, folder), floating)
    nodes = [(n, op_of(n.op_type)) for n in model.graph.node if n.domain == DOMAIN]
    for node, op in nodes:
        finder.activations(node, op)
    for node in model.graph.node:
        if node.op_type == "Split":
            finder.split(node)
    for node, op in nodes:
        finder.products(node, op)
    finder.constants()
    return finder.found


class _Finder:
    def __init__(
        self, constants: Mapping[str, NDArray[Any]], floating: Mapping[str, NDArray[Any]]
    ) -> None:
        self.found = Found()
        self._constants = constants
        self._floating = floating
        self._rotations: dict[str, tuple[Tensor, Tensor]] = {}
        # by part of a value that is rounded as a whole
        self._part_roundings: dict[str, ValueRounding] = {}

    def activations(self, node: NodeProto, op: Op) -> None:
        """Record the values that one node rounds or reads rounded."""
        rounded_inputs, rounds_output = _rounded_inputs(op), op.name.endswith("NormQuantize")
        known = rounded_inputs or rounds_output or _is_product(op) or op.name.startswith("Embed")
        if not known and any(part in op.name for part in _ROUNDING_WORDS):
            raise InputError(f"rounding by {op.name} is not supported", field=node.name or op.name)
        inputs = inputs_of(node)
        rotated = ""
        if "slow" in inputs:
            constants = (self._constants[inputs[name]] for name in ("slow", "fast"))
            slow, fast = (torch.from_numpy(constant.copy()) for constant in constants)
            rotated = inputs["x"] if rounded_inputs else node.output[0]
            self._rotations[rotated] = (slow, fast)
        for name, scale in rounded_inputs:
            threshold = _attributes(node).get("threshold")
            self._record_value(inputs[name], None if scale is None else inputs[scale], threshold)
        if rounded_inputs:
            self._rotations.pop(rotated, None)  # other nodes may read the value without rotation
        if rounds_output:
            self._record_value(node.output[0], inputs["scale"])
        if "state_scale" in inputs:
            self._record_state(node, inputs["state_scale"])

    def split(self, node: NodeProto) -> None:
        """Record how the parts of a split value are rounded."""
        whole = self.found.values.get(_strip_endings(node.input[0], _ENDINGS))
        if whole is None or whole.scale is None:
            return
        sizes = [int(size) for size in self._constants[node.input[1]]]
        parts = torch.split(whole.scale.expand(sum(sizes)), sizes)
        for name, scale in zip(node.output, parts, strict=True):
            self._part_roundings[_strip_endings(name, _ENDINGS)] = ValueRounding(scale)

    def products(self, node: NodeProto, op: Op) -> None:
        """Record the matrix that one node reads."""
        inputs = inputs_of(node)
        if _is_product(op):
            self._record_product(node, op, inputs)
        elif "packed" in inputs:
            self._record_weight(
                _strip_endings(inputs["packed"], (".packed",)),
                self._block_weight(node, inputs),
            )
        elif op.name == "EmbedInt8":
            self._record_weight(inputs["table"], self._int8_weight(inputs["table"]))

    def _record_value(self, name: str, scale: str | None, threshold: float | None = None) -> None:
        turn = self._rotations.get(name)
        vector = None if scale is None else torch.from_numpy(self._constants[scale].copy())
        self.found.values.setdefault(
            _strip_endings(name, _ENDINGS), ValueRounding(vector, turn, threshold)
        )

    def _record_state(self, node: NodeProto, name: str) -> None:
        bits = _attributes(node)["state_bits"]
        if bits == 32:
            return
        scale = torch.from_numpy(self._constants[name].copy())
        self.found.states[node.output[1]] = StateRounding(bits, scale)

    # -- weights ---------------------------------------------------------------------------------

    def _record_product(self, node: NodeProto, op: Op, inputs: dict[str, str]) -> None:
        stored = inputs.get("weight") or inputs["packed"]
        name = _strip_endings(stored, (".packed",))
        if op.name == "Linear":
            if not stored.endswith(".outliers"):
                self._record_weight(name, self._constants[stored].astype(np.float32))
            return
        weight = (
            self._block_weight(node, inputs) if "packed" in inputs else self._int8_weight(stored)
        )
        if "x_scale" in inputs:
            # None for scales per row, which are computed at run time
            shared_scale = self._constants.get(inputs["x_scale"])
            weight = self._for_floating_input(inputs["x"], name, weight, shared_scale)
        self._record_weight(name, weight)

    def _for_floating_input(
        self, x: str, name: str, weight: F32, shared_scale: NDArray[Any] | None
    ) -> F32:
        """Return W such that W·x is the product for an unrounded x.

        Undoes the rotation, applies the scales of columns, and restores the outlier columns, which
        have a product of their own.
        """
        x_name = _strip_endings(x, _ENDINGS)
        value = self.found.values.get(x_name) or self._part_roundings.get(x_name)
        if value is None:
            raise InputError(f"reads {x}, whose rounding is unknown", field=name)
        if value.turn is not None:
            slow, fast = value.turn
            weight = hadamard(torch.from_numpy(weight), slow.T, fast.T).numpy()
        if value.scale is not None and shared_scale is not None and value.scale.numel() > 1:
            scale = value.scale.numpy()
            weight = weight * (shared_scale / scale)
            if f"{name}.outliers" in self._constants:
                weight[:, scale > NEVER] = self._constants[f"{name}.outliers"]
        return np.ascontiguousarray(weight, np.float32)

    def _int8_weight(self, name: str) -> F32:
        quants, scale = self._constants[name], self._constants[f"{name}.scale"]
        rows = scale.size > 1 and scale.size == quants.shape[0] and quants.ndim == 2
        return dequantize_int8(quants, scale, rows=rows)

    def _block_weight(self, node: NodeProto, inputs: dict[str, str]) -> F32:
        packed, scales = (self._constants[inputs[name]] for name in ("packed", "scales"))
        minimums = self._constants[inputs["minimums"]] if "minimums" in inputs else None
        return dequantize_blocks(packed, scales, _attributes(node)["bits"], minimums)

    def _record_weight(self, name: str, weight: F32) -> None:
        original = self._floating.get(name)
        if original is not None and not np.array_equal(original.astype(np.float32), weight):
            self.found.weights[name] = weight

    def constants(self) -> None:
        """Record the small weights of scans and convolutions, kept in int8 or on its grid."""
        for name, original in self._floating.items():
            if not name.startswith("layers.") or name in self.found.weights:
                continue
            if name not in self._constants or original.dtype != np.float32:
                continue
            constant = self._constants[name]
            if constant.dtype == np.int8 and f"{name}.scale" in self._constants:
                constant = dequantize_int8(constant, self._constants[f"{name}.scale"])
                if name.endswith(".A_log"):  # the floating scan reads -exp of it
                    constant = -np.exp(constant)
            if constant.shape == original.shape and constant.dtype == np.float32:
                self._record_weight(name, constant)


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _strip_endings(name: str, endings: tuple[str, ...]) -> str:
    for ending in endings:
        name = name.removesuffix(ending)
    return name


def with_weights(model: ModelProto, weights: Mapping[str, F32]) -> ModelProto:
    """Return a copy of a graph with the initializers of these names replaced."""
    copy = ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return copy
