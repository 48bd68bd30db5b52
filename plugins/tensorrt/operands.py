"""Convert a planned node to one of the device graph: its op, inputs, outputs and attributes.

Inputs and outputs are in the order of the op's statement (`edge.plugins.device`). A node that reads
some columns of a tensor has the whole tensor as its input; attributes select the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.errors import ExportError
from edge.launch import DType, host_inputs
from edge.ops import Op
from edge.plugins.device.statements import DEVICE_OPS, device_name, in_place, viewable
from edge.plugins.lowering.context import Lowering, Node, View
from edge.plugins.lowering.plan import PICKED, Lowered, taps
from edge.plugins.tensorrt import OUT


@dataclass(frozen=True)
class Tensor:
    """Type and dimensions."""

    dtype: DType
    dims: tuple[int | str, ...]


class Tensors:
    """Tensors by name: constants, inputs that the host writes, states, logs, caches, values.

    The memory of a state, log or cache after the run has the suffix `.out`.
    """

    def __init__(self, lowered: Lowered) -> None:
        graph, tables, _ = lowered
        self._tensors = {n: Tensor(c.dtype, c.shape) for n, c in graph.constants.items()}
        lists = host_inputs(taps(graph), graph.rotations)
        self._tensors |= {name: Tensor(dtype, dims) for name, (dtype, dims) in lists.items()}
        self._tensors |= {
            n: Tensor(log.dtype, ("S", "B", log.width)) for n, log in tables.logs.items()
        }
        for name, (dtype, shape) in graph.inputs.items():
            if name.endswith(("conv_state", "ssm_state")):
                self._tensors[name] = Tensor(dtype, (2, *shape))
            elif name.endswith(("key_cache", "value_cache")):
                batch, heads, _, width = shape
                self._tensors[name] = Tensor(dtype, (batch, heads, "C", width))
        for name, buffer in tables.values.items():
            dims = (*buffer.elements.of, buffer.elements.times)
            self._tensors[name] = Tensor(buffer.dtype, dims[:2] if name == PICKED else dims)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor. Raises ExportError when there is none of that name."""
        tensor = self._tensors.get(name) or self._tensors.get(name.removesuffix(OUT))
        if tensor is None:
            raise ExportError(f"the device graph has no tensor {name!r}", field=name)
        return tensor


@dataclass(frozen=True)
class Operands:
    """A device node without its launches.

    Attributes:
        op: name in `edge.plugins.device.statements.DEVICE_OPS`.
        aliases: for each output, the index of the input whose memory it is, or -1.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: tuple[int, ...]
    attributes: dict[str, int | float]


def operands(at: Lowering, node: Node) -> Operands:
    """Convert a node. Raises ExportError when it does not match its op's statement."""
    bound = dict(node.inputs)
    attributes: dict[str, int | float] = dict(node.attributes)
    views = {n: at.views[v] for n, v in bound.items() if v in at.views}
    try:
        name = device_name(node.op, attributes)
    except KeyError:
        raise ExportError(f"{node.op} is not a device op", field=node.name) from None
    op = DEVICE_OPS[name]
    bound |= _steering(at, op, bound)
    bound |= {n: _whole(op, n, view, node) for n, view in views.items()}
    attributes |= _columns(op, views)
    if "start" in attributes:
        attributes["conv_start"] = attributes["start"]
    missing = [v.name for v in op.inputs if v.name not in bound]
    if missing:
        raise ExportError(f"{name} lacks {', '.join(missing)}", field=node.name)
    inputs = tuple(bound[v.name] for v in op.inputs)
    outputs = _outputs(op, node, bound)
    shared, input_names = in_place(op), [v.name for v in op.inputs]
    return Operands(
        op=name,
        inputs=inputs,
        outputs=tuple(outputs.values()),
        aliases=tuple(input_names.index(shared[o]) if o in shared else -1 for o in outputs),
        attributes={a.name: attributes[a.name] for a in op.attributes},
    )


def _steering(at: Lowering, op: Op, bound: dict[str, str]) -> dict[str, str]:
    """Return the index inputs, which the host writes before a run, and the logs beside a state.

    They replace index inputs of the functional op that have the same name but another meaning.
    """
    names = {v.name: v.name for v in op.inputs if v.role == "index"}
    states = {v.name for v in op.inputs if v.role == "state"}
    for name in states & bound.keys():
        layer, dot, _ = bound[name].rpartition(".")
        names |= {log: f"{layer}{dot}{log}" for log in states - bound.keys()}
    if "taps" in names:
        width = at.constant(bound.get("conv_weight") or bound["weight"]).shape[0]
        names |= {"taps": f"taps{width}", "state_taps": f"state_taps{width}"}
    return names


def _whole(op: Op, name: str, view: View, node: Node) -> str:
    """Return the tensor that contains a value."""
    if name not in viewable(op) and (view.offset or view.width != view.stride):
        raise ExportError(f"reads some columns of {view.buffer!r} as {name}", field=node.name)
    return view.buffer


def _columns(op: Op, views: dict[str, View]) -> dict[str, int | float]:
    read = [name for name in viewable(op) if name in views]
    starts: dict[str, int | float] = {f"{name}_start": views[name].offset for name in read}
    return starts | {f"{name}_width": views[name].width for name in read}


def _outputs(op: Op, node: Node, bound: dict[str, str]) -> dict[str, str]:
    """Return name in the statement → tensor, without trailing outputs that nothing reads."""
    shared = in_place(op)
    values = iter(node.outputs.values())
    names = {
        v.name: f"{bound[shared[v.name]]}{OUT}" if v.name in shared else next(values)
        for v in op.outputs
    }
    while not next(reversed(names.values())):
        names.popitem()
    if not all(names.values()):
        raise ExportError("has an unread output before one that is read", field=node.name)
    return names
