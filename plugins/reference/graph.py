"""Run an exported graph node by node with the reference ops, which define a bundle's numbers.

Function bodies are ignored: an `edge` node runs its op's reference, whichever engine the bodies
were written for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from torch import Tensor

from edge.errors import ExportError
from edge.ops import DOMAIN
from edge.plugins.catalogue import OPS, home, parts, snake
from edge.plugins.onnx.library import op_of

Array = NDArray[Any]
# Called with the name and tensor of every value a node yields; a tensor it returns replaces it.
Hook = Callable[[str, Tensor], Tensor | None]

_TYPES: dict[int, str] = {
    TensorProto.FLOAT: "tensor(float)",
    TensorProto.FLOAT16: "tensor(float16)",
    TensorProto.INT8: "tensor(int8)",
    TensorProto.UINT8: "tensor(uint8)",
    TensorProto.INT32: "tensor(int32)",
    TensorProto.INT64: "tensor(int64)",
    TensorProto.BOOL: "tensor(bool)",
}


@dataclass(frozen=True)
class Port:
    """An input or output of the graph, as ONNX Runtime describes one."""

    name: str
    shape: list[int | str]
    type: str


@dataclass(frozen=True)
class _Step:
    """One node, the function that runs it, and the values not needed after it."""

    node: NodeProto
    run: Callable[..., tuple[Tensor, ...]]
    dead: tuple[str, ...]


class ReferenceGraph:
    """An exported graph, run on the CPU, with its `weights.bin` in `folder`.

    It has the methods of ONNX Runtime's session that `edge.export.graph.run.GraphRunner` uses.
    Runs are chains of any length and batch. A value is dropped after its last use. Weights are
    views of the mapped file, cast when they are used.

    Attributes:
        hook: see `Hook`; None for none. It must not modify the tensors it receives.
        ops: functions by `edge` op that replace the references, where faster but slightly
            different results will do: for calibration, never for verification.
    """

    def __init__(
        self,
        model: bytes | ModelProto,
        folder: str | Path,
        *,
        ops: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.hook: Hook | None = None
        proto = ModelProto.FromString(model) if isinstance(model, bytes) else model
        self._graph = proto.graph
        self._ops = dict(ops or {})
        self._constants = _Constants(proto.graph.initializer, Path(folder))
        self._plans: dict[tuple[tuple[str, ...], frozenset[str]], list[_Step]] = {}

    def get_inputs(self) -> list[Port]:
        return [_port(value) for value in self._graph.input]

    def get_outputs(self) -> list[Port]:
        return [_port(value) for value in self._graph.output]

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Array]) -> list[Array]:
        """Return the values called `names` (of any node; None for the outputs), as arrays.

        Only the nodes they depend on are run. Raises ExportError for a tree, an unknown op or
        value, and missing weights.
        """
        requested = [port.name for port in self.get_outputs()] if names is None else list(names)
        values = self.watch(self.hook, (), feeds, requested)
        return [values[name] for name in requested]

    def watch(
        self,
        hook: Hook | None,
        watched: Collection[str],
        feeds: Mapping[str, Array],
        names: Sequence[str] = (),
    ) -> dict[str, Array]:
        """Return `names` by name, like `run`, and show `hook` the values `watched` as well.

        Watched values are not kept. Several threads may watch at the same time.
        """
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in feeds.items()}
        values = self._values(tuple(names), tensors, frozenset(watched), hook)
        return {name: tensor.numpy() for name, tensor in values.items()}

    @torch.no_grad()
    def _values(
        self,
        names: tuple[str, ...],
        feeds: Mapping[str, Tensor],
        watched: frozenset[str],
        hook: Hook | None,
    ) -> dict[str, Tensor]:
        _refuse_trees(feeds)
        values = dict(feeds)
        for step in self._plan(names, watched):
            inputs = [self._value(name, values, step.node) for name in step.node.input]
            outputs = step.run(*inputs)
            for name, tensor in zip(step.node.output, outputs, strict=True):
                changed = None if hook is None else hook(name, tensor)
                values[name] = tensor if changed is None else changed
            for name in step.dead:
                values.pop(name, None)
        return {name: values[name] for name in names}

    def _value(self, name: str, values: Mapping[str, Tensor], node: NodeProto) -> Tensor:
        tensor = values.get(name)
        if tensor is None:
            tensor = self._constants.get(name)
        if tensor is None:
            raise ExportError(f"the graph's input {name!r} was not given", field=node.name)
        return tensor

    def _plan(self, names: tuple[str, ...], watched: frozenset[str]) -> list[_Step]:
        """Return the nodes that `names` and `watched` depend on, in order."""
        key = (names, watched)
        if key not in self._plans:
            requested = watched | set(names)
            needed, nodes = set(requested), []
            for node in reversed(self._graph.node):
                if needed & set(node.output):
                    needed |= set(node.input)
                    nodes.append(node)
            missing = requested - {name for node in nodes for name in node.output}
            if missing:
                raise ExportError(f"no node of the graph yields {sorted(missing)[0]!r}")
            # `nodes` runs from last to first, so a value's first appearance is its last use.
            seen, steps = set(names), []
            for node in nodes:
                dead = {*node.input, *node.output} - seen
                seen |= dead
                steps.append(self._step(node, tuple(dead)))
            self._plans[key] = steps[::-1]
        return self._plans[key]

    def _step(self, node: NodeProto, dead: tuple[str, ...]) -> _Step:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        try:
            if node.domain == DOMAIN:
                op = op_of(node.op_type).name
                run = by_name(op, attributes, self._ops.get(op))
            else:
                run = _standard({"": node.op_type}[node.domain], attributes)
        except KeyError:
            label = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            raise ExportError(f"no reference runs {label}", field=node.name) from None
        return _Step(node, run, dead)


def by_name(
    op: str, attributes: Mapping[str, Any], function: Callable[..., Any] | None = None
) -> Callable[..., tuple[Tensor, ...]]:
    """Wrap an op's reference, or `function`, to take the op's inputs in order.

    The wrapped function receives the inputs and attributes that its parameters name, named as in
    the statement.
    """
    if function is None:
        module = parts("reference")[home(op)]
        function = getattr(module, f"{snake(op)}_node", None) or getattr(module, snake(op))
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    names = [v.name for v in OPS[op].inputs]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        arguments = {**dict(zip(names, inputs, strict=False)), **attributes}
        return _tuple(
            function(**{n: value for n, value in arguments.items() if takes_any or n in parameters})
        )

    return run


def _standard(op: str, attributes: Mapping[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a standard ONNX op. Names that Python reserves end in `_`."""
    module = parts("reference")["standard"]
    function = getattr(module, snake(op), None) or getattr(module, f"{snake(op)}_", None)
    if function is None:
        raise KeyError(op)
    return lambda *inputs: _tuple(function(*inputs, **attributes))


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


class _Constants:
    """Initializers by name: views of the mapped weight file, or copies from the graph itself."""

    def __init__(self, protos: Iterable[TensorProto], folder: Path) -> None:
        self._protos = {proto.name: proto for proto in protos}
        self._folder = folder
        self._files: dict[str, Array] = {}

    def get(self, name: str) -> Tensor | None:
        proto = self._protos.get(name)
        if proto is None:
            return None
        if proto.data_location != TensorProto.EXTERNAL:
            return torch.from_numpy(numpy_helper.to_array(proto).copy())
        entry = {e.key: e.value for e in proto.external_data}
        data = self._file(entry["location"])
        start, size = int(entry["offset"]), int(entry["length"])
        dtype = helper.tensor_dtype_to_np_dtype(proto.data_type)
        if start + size > data.size:
            raise ExportError(
                f"ends before {name!r}", file=self._folder / entry["location"],
                remedy="the file does not belong to this graph",
            )  # fmt: skip
        return torch.from_numpy(data[start : start + size].view(dtype).reshape(proto.dims))

    def _file(self, location: str) -> Array:
        if location not in self._files:
            if Path(location).name != location:
                raise ExportError(f"the graph's weights lie outside its folder: {location!r}")
            path = self._folder / location
            try:
                # Copy on write: nothing is copied, and torch does not warn of read-only memory.
                self._files[location] = np.memmap(path, np.uint8, "c")
            except (OSError, ValueError) as error:
                raise ExportError(f"cannot be read: {error}", file=path) from None
        return self._files[location]


def _port(value: ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    shape = [dim.dim_param or int(dim.dim_value) for dim in tensor.shape.dim]
    return Port(value.name, shape, _TYPES[tensor.elem_type])


def _refuse_trees(feeds: Mapping[str, Tensor]) -> None:
    """Check that every index input describes a chain. Raises ExportError for a tree."""
    steps = int(feeds["tokens"].shape[0])
    order = torch.arange(steps)
    chain = {"parents": order - 1, "tree": torch.tensor(False)}
    chain["ancestors"] = chain["paths"] = torch.ones(steps, steps).tril()
    for name, tensor in feeds.items():
        if name.startswith("taps"):
            chain[name] = order[:, None] + torch.arange(tensor.shape[1])
    for name, expected in chain.items():
        if name in feeds and not torch.equal(feeds[name], expected):
            raise ExportError("the reference ops run chains only, not trees", field=name)
