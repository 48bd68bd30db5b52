"""Lower standard ONNX ops on rows of channels, to kernels of `rows` or to views of a value."""

from __future__ import annotations

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.lowering.context import (
    Arguments,
    Lowering,
    Node,
    View,
    cdiv,
    next_power_of_2,
    warps_for,
)

_BLOCK = 1024


def lower_add(at: Lowering, node: Node) -> None:
    """Add two values, or a value and a constant [D] (a bias), in either order."""
    names = sorted(node.inputs.values(), key=lambda name: name in at.constants)
    a = at.view(names[0])
    b = at.constants.get(names[1]) or at.view(names[1])
    if (b.width if isinstance(b, View) else b.size) != a.width:
        raise ExportError(f"adds {names[1]!r}, which has a different width", field=node.name)
    y = at.new(_output(node), "f32", a.rows, a.width)
    strides = {"A_STRIDE": a.stride, "B_STRIDE": b.stride if isinstance(b, View) else 0}
    pointers = {"a": at.pointer(a), "b": at.pointer(b), "y": at.pointer(y)}
    _rows(at, "add", y, pointers, {"WIDTH": a.width, **strides})


def lower_gather(at: Lowering, node: Node) -> None:
    """Pick columns by a constant list, or the wanted rows by the input `rows`."""
    x, index = at.view(node.inputs["data"]), node.inputs["indices"]
    if node.attributes.get("axis", 0) == 0 and index == "rows":
        return gather_rows(at, x, _output(node))
    columns = at.constant(index)
    y = at.new(_output(node), x.dtype, x.rows, columns.size)
    pointers = {"x": at.pointer(x), "columns": at.pointer(columns), "y": at.pointer(y)}
    return _rows(at, "gather_columns", y, pointers, {"WIDTH": columns.size, "X_STRIDE": x.stride})


def gather_rows(at: Lowering, x: View, name: str) -> None:
    """Pick the wanted rows: row l·B+b of `name` is row rows[l]·B+b of x."""
    y = at.new(name, x.dtype, "LB", x.width)
    arguments: Arguments = {
        "x": at.pointer(x), "rows": at.input("rows", "i32", Size(of="L")), "y": at.pointer(y),
        "B": at.size("B"),
    }  # fmt: skip
    _rows(at, "gather_rows", y, arguments, {"WIDTH": x.width, "X_STRIDE": x.stride})


def lower_concat(at: Lowering, node: Node) -> None:
    """Concatenate two values along the channels."""
    if len(node.inputs) != 2:
        raise ExportError("must concatenate exactly two values", field=node.name)
    a, b = (at.view(name) for name in node.inputs.values())
    y = at.new(_output(node), a.dtype, a.rows, a.width + b.width)
    widths = {"A_WIDTH": a.width, "B_WIDTH": b.width, "A_STRIDE": a.stride, "B_STRIDE": b.stride}
    pointers = {"a": at.pointer(a), "b": at.pointer(b), "y": at.pointer(y)}
    _rows(at, "concat", y, pointers, widths)


def _rows(
    at: Lowering, kernel: str, y: View, arguments: Arguments, constants: dict[str, int]
) -> None:
    """Launch a kernel of `rows` on all rows of y, in pieces of at most _BLOCK channels."""
    block = min(next_power_of_2(y.width), _BLOCK)
    grid = (Size(of=y.rows), Size(times=cdiv(y.width, block)))
    constants = {**constants, "BLOCK": block}
    at.launch(f"rows.{kernel}", arguments, constants, grid, warps=warps_for(block))


def lower_split(at: Lowering, node: Node) -> None:
    """Split channels into views of the value: no launch, no copy."""
    x = at.view(node.inputs["input"])
    widths = [int(width) for width in at.constant(node.inputs["split"]).array()]
    if node.attributes.get("axis") != -1 or sum(widths) != x.width:
        raise ExportError("does not split channels", field=node.name)
    start = 0
    for name, width in zip(node.outputs.values(), widths, strict=True):
        at.views[name] = x.columns(start, width)
        start += width


def lower_transpose(at: Lowering, node: Node) -> None:
    """Swap [T, B, …] and [B, T, …] without a launch: kernels read row t·B+b either way."""
    if list(node.attributes.get("perm", ())) != [1, 0, 2]:
        raise ExportError("swaps axes other than time and batch", field=node.name)
    at.views[_output(node)] = at.view(node.inputs["data"])


def _output(node: Node) -> str:
    return next(iter(node.outputs.values()))
