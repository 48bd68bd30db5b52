"""Read a bundle's graph: the nodes that compute logits, the constants and the index inputs.

Two kinds of nodes are left out: those whose outputs nothing reads, and standard ones that depend on
no activation (row indices, RoPE angles), which the host computes and passes to kernels as inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, defs, helper, numpy_helper

from edge.errors import ExportError
from edge.launch import DType
from edge.ops import DOMAIN
from edge.plugins.catalogue import OPS
from edge.plugins.lowering.context import Array, Constant, Node
from edge.plugins.onnx.library import OPSETS, op_of
from edge.rope import powers

WEIGHT_FILE = "weights.bin"
_DTYPES: Mapping[int, DType] = {
    TensorProto.FLOAT: "f32",
    TensorProto.FLOAT16: "f16",
    TensorProto.INT8: "i8",
    TensorProto.UINT8: "u8",
    TensorProto.INT32: "i32",
    TensorProto.INT64: "i64",
}


@dataclass(frozen=True)
class Graph:
    """A graph as lowerings see it.

    Attributes:
        nodes: nodes that compute activations, in order; an output without readers is named "".
        constants: initializers by name.
        offsets: start of each weight in weights.bin, in bytes.
        inputs: type and shape of each input that kernels can read.
        outputs: values that an engine reads after a run.
        rotations: (theta, dim) of the RoPE tables `rope{i}`, in order; theta is 0 where the inverse
            frequencies are not powers of a theta.
        inverses: inverse frequencies of the tables whose theta is 0, by `rope{i}`.
    """

    nodes: tuple[Node, ...]
    constants: Mapping[str, Constant]
    offsets: Mapping[str, int]
    inputs: Mapping[str, tuple[DType, tuple[int | str, ...]]]
    outputs: frozenset[str]
    rotations: tuple[tuple[float, int], ...]
    inverses: Mapping[str, tuple[float, ...]]


def read_graph(model: bytes | ModelProto, folder: str | Path) -> Graph:
    """Read the graph of a model whose `weights.bin` is in `folder`.

    Raises ExportError when an op or a type is unknown, or a weight is not where it should be.
    """
    graph = (ModelProto.FromString(model) if isinstance(model, bytes) else model).graph
    weights = _Weights(Path(folder) / WEIGHT_FILE)
    constants = {proto.name: weights.constant(proto) for proto in graph.initializer}
    # kernels keep the logs themselves, so the graph's outputs for them are not needed
    logged = {v.name.removesuffix("_log") for v in graph.input if v.name.endswith("_log")}
    outputs = frozenset(value.name for value in graph.output) - logged
    nodes = _activation_nodes(_node(proto) for proto in graph.node)
    rotations, inverses = _rotations(constants)
    return Graph(
        nodes=live(nodes, outputs),
        constants=constants,
        offsets=weights.offsets,
        inputs=_inputs(graph.input),
        outputs=outputs,
        rotations=rotations,
        inverses=inverses,
    )


def live(nodes: Iterable[Node], outputs: frozenset[str]) -> tuple[Node, ...]:
    """Return the nodes that `outputs` depend on, with their unread outputs named ""."""
    needed, kept = set(outputs), []
    for node in reversed(list(nodes)):
        produced = {name: v if v in needed else "" for name, v in node.outputs.items()}
        if any(produced.values()):
            needed |= set(node.inputs.values())
            kept.append(replace(node, outputs=produced))
    return tuple(reversed(kept))


def _node(proto: NodeProto) -> Node:
    if proto.domain not in ("", DOMAIN):
        raise ExportError(f"no kernel runs {proto.domain}::{proto.op_type}", field=proto.name)
    op = proto.op_type
    if proto.domain == DOMAIN:
        try:
            op = op_of(op).name
        except KeyError:
            raise ExportError(f"unknown op {op!r}", field=proto.name) from None
    attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
    return bound(op, proto.name or proto.output[0], proto.input, proto.output, attributes)


def bound(
    op: str,
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, Any],
) -> Node:
    """Make a node whose values are named as in the statement, or in ONNX's schema.

    Trailing values that this form of the op does not use may be absent.
    """
    if op in OPS:
        signature = [[v.name for v in values] for values in (OPS[op].inputs, OPS[op].outputs)]
        absent = {a.name: a.absent for a in OPS[op].attributes if a.absent is not None}
        attributes = {**absent, **attributes}
    else:
        schema = defs.get_schema(op, OPSETS[""])
        signature = [_names(schema.inputs, len(inputs)), _names(schema.outputs, len(outputs))]
    bound_inputs, bound_outputs = (
        dict(zip(names, values, strict=False))
        for names, values in zip(signature, (inputs, outputs), strict=True)
    )
    return Node(op, name, bound_inputs, bound_outputs, attributes)


def _names(formal: Sequence[defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """Return the names of `count` parameters; variadic ones are `inputs0`, `inputs1`, …"""
    names = [parameter.name for parameter in formal]
    if formal[-1].option == defs.OpSchema.FormalParameterOption.Variadic:
        last = names.pop()
        names += [f"{last}{number}" for number in range(count - len(names))]
    return names


def _inputs(values: Iterable[ValueInfoProto]) -> dict[str, tuple[DType, tuple[int | str, ...]]]:
    inputs: dict[str, tuple[DType, tuple[int | str, ...]]] = {}
    for value in values:
        tensor = value.type.tensor_type
        shape = (d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim)
        if tensor.elem_type in _DTYPES:
            inputs[value.name] = _DTYPES[tensor.elem_type], tuple(shape)
    return inputs


def _activation_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Return the `edge` ops and the nodes that depend on one; the others only compute indices."""
    activations: set[str] = set()
    kept = []
    for node in nodes:
        if node.op in OPS or activations & set(node.inputs.values()):
            activations |= set(node.outputs.values())
            kept.append(node)
    return kept


class _Weights:
    """Constants, and their offsets in weights.bin, which is mapped on the first read."""

    def __init__(self, path: Path) -> None:
        self.offsets: dict[str, int] = {}
        self._path = path
        self._data: Array | None = None

    def constant(self, proto: TensorProto) -> Constant:
        if proto.data_type not in _DTYPES:
            raise ExportError("has a type that no kernel reads", field=proto.name)
        dtype, shape = _DTYPES[proto.data_type], tuple(proto.dims)
        if proto.data_location != TensorProto.EXTERNAL:
            return Constant(
                proto.name, "inline", dtype, shape, lambda: numpy_helper.to_array(proto)
            )
        entry = {e.key: e.value for e in proto.external_data}
        if entry.get("location") != WEIGHT_FILE:
            raise ExportError(f"is not in {WEIGHT_FILE}", field=proto.name)
        start, size = int(entry["offset"]), int(entry["length"])
        self.offsets[proto.name] = start
        kind = helper.tensor_dtype_to_np_dtype(proto.data_type)

        def read() -> Array:
            return self._bytes(start, size, proto.name).view(kind).reshape(shape)

        return Constant(proto.name, "weight", dtype, shape, read)

    def _bytes(self, start: int, size: int, name: str) -> Array:
        if self._data is None:
            try:
                self._data = np.memmap(self._path, np.uint8, "r")
            except (OSError, ValueError) as problem:
                raise ExportError(f"cannot be read: {problem}", file=self._path) from None
        if start + size > self._data.size:
            raise ExportError(
                f"ends before {name!r}",
                file=self._path,
                remedy="the file does not belong to this graph",
            )
        return self._data[start : start + size]


def _rotations(
    constants: Mapping[str, Constant],
) -> tuple[tuple[tuple[float, int], ...], dict[str, tuple[float, ...]]]:
    """Return `Graph.rotations` and `Graph.inverses`."""
    rotations: list[tuple[float, int]] = []
    inverses: dict[str, tuple[float, ...]] = {}
    while f"rope{len(rotations)}.inverse" in constants:
        inverse = constants[f"rope{len(rotations)}.inverse"].array()
        theta = _theta(inverse)
        if theta is None:
            inverses[f"rope{len(rotations)}"] = tuple(float(frequency) for frequency in inverse)
        rotations.append((theta or 0.0, 2 * inverse.size))
    return tuple(rotations), inverses


def _theta(inverse: Array) -> float | None:
    """Return the theta with the fewest digits whose theta^(-2i/dim) equal `inverse` [dim/2] to
    fp32's last digit, or None if there is none, as for scaled frequencies.
    """
    dim = 2 * inverse.size
    if inverse[0] != 1:
        return None
    if dim == 2:
        return 1.0  # theta^0 is 1 for every theta
    estimate = float(inverse[-1]) ** (-dim / (dim - 2)) if inverse[-1] > 0 else 0.0
    for digits in range(1, 10):
        theta = float(f"{estimate:.{digits}g}")
        # machines differ in the last bit of a power
        if theta > 0 and np.allclose(powers(theta, dim), inverse, rtol=5e-7, atol=0):
            return theta
    return None
