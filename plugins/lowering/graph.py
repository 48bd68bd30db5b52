"""What a bundle's graph says: the nodes that make logits, its constants, its index inputs.

Nodes of the standard domain that only steer (which rows, which angles) are computed by the host,
which hands their results to the kernels as inputs: they are left out, as is what nothing reads.
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
        nodes: those of values with channels, in order; an output that nothing reads is named "".
        constants: initializers by name.
        offsets: where those of weights.bin start in it.
        inputs: those of types that kernels read, with their shapes.
        outputs: what an engine reads after a run.
        rotations: (theta, dim) of the rope tables `rope{i}`, in order; theta 0 where the inverse
            frequencies are no powers of one.
        inverses: those, by `rope{i}`.
    """

    nodes: tuple[Node, ...]
    constants: Mapping[str, Constant]
    offsets: Mapping[str, int]
    inputs: Mapping[str, tuple[DType, tuple[int | str, ...]]]
    outputs: frozenset[str]
    rotations: tuple[tuple[float, int], ...]
    inverses: Mapping[str, tuple[float, ...]]


def read_graph(model: bytes | ModelProto, folder: str | Path) -> Graph:
    """The graph of a model whose `weights.bin` lies in `folder`.

    Raises ExportError when some op or type is not known, or a weight is not where it should be.
    """
    graph = (ModelProto.FromString(model) if isinstance(model, bytes) else model).graph
    weights = _Weights(Path(folder) / WEIGHT_FILE)
    constants = {proto.name: weights.constant(proto) for proto in graph.initializer}
    # a plan logs what scans read by itself
    logged = {v.name.removesuffix("_log") for v in graph.input if v.name.endswith("_log")}
    outputs = frozenset(value.name for value in graph.output) - logged
    nodes = _flowing(_node(proto) for proto in graph.node)
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
    """The nodes that `outputs` depend on; of theirs, outputs that nothing reads are named ""."""
    read, kept = set(outputs), []
    for node in reversed(list(nodes)):
        made = {name: v if v in read else "" for name, v in node.outputs.items()}
        if any(made.values()):
            read |= set(node.inputs.values())
            kept.append(replace(node, outputs=made))
    return tuple(reversed(kept))


def _node(proto: NodeProto) -> Node:
    if proto.domain not in ("", DOMAIN):
        raise ExportError(f"no kernel runs {proto.domain}::{proto.op_type}", field=proto.name)
    op = proto.op_type
    if proto.domain == DOMAIN:
        try:
            op = op_of(op).name
        except KeyError:
            raise ExportError(f"the op {op!r} is not stated", field=proto.name) from None
    attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
    return bound(op, proto.name or proto.output[0], proto.input, proto.output, attributes)


def bound(
    op: str,
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, Any],
) -> Node:
    """A node with the names that the statement, or ONNX's schema, has for its values.

    What an op ends in, and does not look at in this form, may be left out.
    """
    if op in OPS:
        stated = [[v.name for v in values] for values in (OPS[op].inputs, OPS[op].outputs)]
        absent = {a.name: a.absent for a in OPS[op].attributes if a.absent is not None}
        attributes = {**absent, **attributes}
    else:
        schema = defs.get_schema(op, OPSETS[""])
        stated = [_names(schema.inputs, len(inputs)), _names(schema.outputs, len(outputs))]
    into, out = (
        dict(zip(names, values, strict=False))
        for names, values in zip(stated, (inputs, outputs), strict=True)
    )
    return Node(op, name, into, out, attributes)


def _names(formal: Sequence[defs.OpSchema.FormalParameter], count: int) -> list[str]:
    """`split`; `inputs0`, `inputs1`, … of as many as there are."""
    names = [each.name for each in formal]
    if formal[-1].option == defs.OpSchema.FormalParameterOption.Variadic:
        last = names.pop()
        names += [f"{last}{number}" for number in range(count - len(names))]
    return names


def _inputs(values: Iterable[ValueInfoProto]) -> dict[str, tuple[DType, tuple[int | str, ...]]]:
    found: dict[str, tuple[DType, tuple[int | str, ...]]] = {}
    for value in values:
        tensor = value.type.tensor_type
        shape = (d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim)
        if tensor.elem_type in _DTYPES:
            found[value.name] = _DTYPES[tensor.elem_type], tuple(shape)
    return found


def _flowing(nodes: Iterable[Node]) -> list[Node]:
    """Leave out those that no op of ours comes before: they steer."""
    made: set[str] = set()
    flowing = []
    for node in nodes:
        if node.op in OPS or made & set(node.inputs.values()):
            made |= set(node.outputs.values())
            flowing.append(node)
    return flowing


class _Weights:
    """Constants, and where those of weights.bin start; it is mapped when one is first looked at."""

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
    """`Graph.rotations` and `Graph.inverses`."""
    found: list[tuple[float, int]] = []
    inverses: dict[str, tuple[float, ...]] = {}
    while f"rope{len(found)}.inverse" in constants:
        inverse = constants[f"rope{len(found)}.inverse"].array()
        theta = _theta(inverse)
        if theta is None:
            inverses[f"rope{len(found)}"] = tuple(float(each) for each in inverse)
        found.append((theta or 0.0, 2 * inverse.size))
    return tuple(found), inverses


def _theta(inverse: Array) -> float | None:
    """The shortest theta whose theta^(-2i/dim) are `inverse` [dim/2], to fp32's last digit; None
    where there is none, as for frequencies that were scaled.
    """
    dim = 2 * inverse.size
    if inverse[0] != 1:
        return None
    if dim == 2:
        return 1.0  # theta^0 is 1 whatever it is
    near = float(inverse[-1]) ** (-dim / (dim - 2)) if inverse[-1] > 0 else 0.0
    for digits in range(1, 10):
        theta = float(f"{near:.{digits}g}")
        # machines differ in the last bit of a power
        if theta > 0 and np.allclose(powers(theta, dim), inverse, rtol=5e-7, atol=0):
            return theta
    return None
