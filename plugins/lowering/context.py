"""The interface of lowerings: nodes and constants, and methods to request memory and launches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError
from edge.launch import (
    ITEM_SIZE,
    Argument,
    Buffer,
    DType,
    Inline,
    Launch,
    Log,
    Pointer,
    Size,
    Variant,
    Weight,
)

Array = NDArray[Any]
Rows = Literal["TB", "LB"]
Warps = Literal[1, 2, 4, 8, 16]
_TRITON = {"f32": "fp32", "f16": "fp16", "i8": "i8", "u8": "u8", "i32": "i32", "i64": "i64"}
_MAX_NAME = 128
_PIECE = 512
_WARPS: tuple[Warps, ...] = (16, 8, 4, 2, 1)
ONE = Size()
# A kernel's run-time arguments with their Triton types, in the kernel's order; None if absent.
Arguments = Mapping[str, tuple[Argument, str] | None]


@dataclass(frozen=True)
class Node:
    """One node of the graph.

    Attributes:
        op: name of the `edge` op, or of a standard ONNX op.
        inputs, outputs: names in the statement (in ONNX's schema for its own ops) → graph values.
        pair: names of the nodes fused into this one, if they are fused only for few rows.
    """

    op: str
    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    attributes: Mapping[str, Any]
    pair: tuple[str, ...] = ()

    @property
    def int8(self) -> bool:
        """Whether the op works on int8 values."""
        return "Int8" in self.op


@dataclass(frozen=True)
class View:
    """Rows of channels in a buffer: element (row, c) is at `offset + row·stride + c`.

    Attributes:
        rows: number of rows, "TB" (row t·B+b) or "LB".
    """

    buffer: str
    dtype: DType
    rows: Rows
    width: int
    stride: int
    offset: int = 0

    def columns(self, start: int, width: int) -> View:
        return replace(self, offset=self.offset + start, width=width)

    @property
    def aligned(self) -> bool:
        """Whether every row is aligned to 16 bytes."""
        item = ITEM_SIZE[self.dtype]
        return self.offset * item % 16 == 0 and self.stride * item % 16 == 0


@dataclass(frozen=True)
class Constant:
    """An initializer, as known when the plan is made.

    Attributes:
        space: `weight` if stored in weights.bin, `inline` if stored in the graph.
        array: function that reads the values.
    """

    name: str
    space: Literal["weight", "inline"]
    dtype: DType
    shape: tuple[int, ...]
    array: Callable[[], Array]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Regime:
    """The kind of run a program is for. `max_rows` is None for any number, tuned for many rows."""

    kind: Literal["chain", "tree"]
    max_rows: int | None

    @property
    def many(self) -> bool:
        return self.max_rows is None


@dataclass
class Tables:
    """The tables that all programs of a plan share. Lowerings fill them."""

    variants: dict[str, tuple[int, Variant]] = field(default_factory=dict)
    launches: dict[str, tuple[int, Launch]] = field(default_factory=dict)
    values: dict[str, Buffer] = field(default_factory=dict)
    inputs: dict[str, Buffer] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    inline: dict[str, Inline] = field(default_factory=dict)
    logs: dict[str, Log] = field(default_factory=dict)


class Lowering:
    """A program under construction, which lowerings receive together with a node.

    Attributes:
        regime: kind of run the program is for.
        views: value name → its view; a lowering adds its node's outputs.
        constants: initializers by name.
        order: indices of the launches so far.
    """

    def __init__(self, regime: Regime, tables: Tables, constants: Mapping[str, Constant]) -> None:
        self.regime = regime
        self.views: dict[str, View] = {}
        self.constants = constants
        self.order: list[int] = []
        self._tables = tables

    # -- values ----------------------------------------------------------------------------------

    def view(self, name: str) -> View:
        """Return the view of an earlier node's output. Raises ExportError when there is none."""
        if name not in self.views:
            raise ExportError(f"no kernel computes the value {name!r}", field=name)
        return self.views[name]

    def constant(self, name: str) -> Constant:
        if name not in self.constants:
            raise ExportError(f"{name!r} is not a constant of the graph", field=name)
        return self.constants[name]

    def known(self, node: Node, name: str) -> Constant | None:
        """Return the constant behind an input, or None when the node lacks that input."""
        return self.constant(node.inputs[name]) if name in node.inputs else None

    def count(self, node: Node, name: str) -> int:
        """Return the size of a constant input, for a scale 1 or one per channel; 0 if absent."""
        constant = self.known(node, name)
        return 0 if constant is None else constant.size

    def new(self, name: str, dtype: DType, rows: Rows, width: int) -> View:
        """Allocate a buffer in the arena for the value `name`, with contiguous rows."""
        buffer = Buffer(dtype=dtype, elements=Size(times=width, of=rows))
        if self._tables.values.setdefault(name, buffer) != buffer:
            raise ExportError(f"the value {name!r} has two types or sizes", field=name)
        self.views[name] = View(name, dtype, rows, width, width)
        return self.views[name]

    # -- arguments -------------------------------------------------------------------------------

    @overload
    def pointer(self, what: View | Constant) -> tuple[Pointer, str]: ...

    @overload
    def pointer(self, what: None) -> None: ...

    def pointer(self, what: View | Constant | None) -> tuple[Pointer, str] | None:
        """Return a value or constant as an argument; None stays None (see `launch`)."""
        if what is None:
            return None
        if isinstance(what, View):
            pointer = Pointer(space="value", name=what.buffer, at=what.offset)
            return pointer, _pointer_type(what.dtype, what.offset)
        entry = self._declare(what)
        return Pointer(space=what.space, name=entry), _pointer_type(what.dtype, 0)

    def given(self, node: Node, *names: str, **called: str) -> Arguments:
        """Return inputs of the node as arguments; those that it lacks are None.

        Args:
            node: the node being lowered.
            names: arguments named like their inputs in the statement.
            called: argument → input, where the names differ.
        """
        inputs = {**{name: name for name in names}, **called}
        values = {argument: node.inputs.get(name) for argument, name in inputs.items()}
        return {
            argument: None if value is None else self.pointer(self._operand(value))
            for argument, value in values.items()
        }

    def _operand(self, name: str) -> View | Constant:
        return self.constants.get(name) or self.view(name)

    def _declare(self, constant: Constant) -> str:
        if constant.space == "inline":
            data = np.ascontiguousarray(constant.array()).tobytes().hex()
            # names of channel lists contain every channel, so they can be of any length
            name = constant.name
            if len(name) > _MAX_NAME:
                name = f"{name[:_MAX_NAME]}…{hashlib.sha256(name.encode()).hexdigest()[:16]}"
            self._tables.inline[name] = Inline(dtype=constant.dtype, data=data)
            return name
        if constant.name not in self._tables.weights:
            raise ExportError(f"{constant.name!r} is not in weights.bin", field=constant.name)
        return constant.name

    def input(self, name: str, dtype: DType, elements: Size) -> tuple[Pointer, str]:
        """Declare an array that the host writes before each run: `run`, `tokens`, `taps4`, …"""
        buffer = Buffer(dtype=dtype, elements=elements)
        if self._tables.inputs.setdefault(name, buffer) != buffer:
            raise ExportError(f"the input {name!r} has two types or sizes", field=name)
        return Pointer(space="input", name=name), _pointer_type(dtype, 0)

    def run(self) -> tuple[Pointer, str]:
        """The input `run`, i32[8]: the fields `edge.launch.RUN_FIELDS`."""
        return self.input("run", "i32", Size(times=8))

    def replay(self) -> tuple[Pointer, str]:
        """Log slots of the tokens to replay, oldest first, i32[S]; the first run[PENDING] count."""
        return self.input("replay", "i32", Size(of="S"))

    def slots(self) -> tuple[Pointer, str]:
        """Log slot that each new token goes to, i32[T]; -1 for none."""
        return self.input("slots", "i32", Size(of="T"))

    def ancestors(self) -> tuple[Pointer, str]:
        """i32[T,T]: [t,j] is 1 when token j is t or on t's path. Written for chains too."""
        return self.input("ancestors", "i32", Size(of="TT"))

    def taps(self, width: int) -> dict[str, tuple[Pointer, str]]:
        """Indices of rows in [state slot: K-1 | log: S | x: T]: the rows that each token reads,
        i32[T,K], and the rows to store as the state, i32[K-1].
        """
        return {
            "taps": self.input(f"taps{width}", "i32", Size(times=width, of="T")),
            "state_taps": self.input(f"state_taps{width}", "i32", Size(times=width - 1)),
        }

    def state(self, name: str, dtype: DType) -> tuple[Pointer, str]:
        """Both slots, [2, …], of `layers.i.ssm_state` or `layers.i.conv_state`."""
        return Pointer(space="state", name=name), _pointer_type(dtype, 0)

    def cache(self, name: str, dtype: DType) -> tuple[Pointer, str]:
        """A cache of keys or values, [B, KV heads, C, P]."""
        return Pointer(space="cache", name=name), _pointer_type(dtype, 0)

    def log(self, state: str, of: str, dtype: DType, width: int) -> tuple[Pointer, str]:
        """The log `of` beside a layer's state, [S, B, width]: slot s has the rows s·B+b."""
        layer, dot, _ = state.rpartition(".")
        name = f"{layer}{dot}{of}"
        log = Log(dtype=dtype, width=width)
        if self._tables.logs.setdefault(name, log) != log:
            raise ExportError(f"the log {name!r} has two types or widths", field=name)
        return Pointer(space="log", name=name), _pointer_type(dtype, 0)

    def size(self, of: str, times: int = 1, per: int = 1) -> tuple[Size, str]:
        """An i32 argument computed from the run's sizes: `size("TB")` is the number of rows."""
        return Size(times=times, of=of, per=per), "i32"

    # -- launches --------------------------------------------------------------------------------

    def launch(
        self,
        kernel: str,
        arguments: Arguments,
        constants: Mapping[str, bool | int | float | str | None],
        grid: tuple[Size, Size, Size] | tuple[Size, Size] | tuple[Size],
        *,
        warps: Warps = 4,
        stages: int = 2,
        settles: bool = False,
    ) -> None:
        """Append a launch; see `Launch` and `Variant`.

        `arguments` are in the kernel's order. Where one is None, the kernel is compiled with None
        as a constant.
        """
        present = {name: value for name, value in arguments.items() if value is not None}
        absent = dict.fromkeys(name for name, value in arguments.items() if value is None)
        variant = Variant(
            kernel=kernel,
            arguments=tuple(present),
            types=tuple(kind for _, kind in present.values()),
            constants={**absent, **constants},
            warps=warps,
            stages=stages,
        )
        number = self._tables.variants.setdefault(
            variant.key, (len(self._tables.variants), variant)
        )[0]
        padded = (*grid, ONE, ONE)[:3]
        launch = Launch(
            variant=number,
            grid=(padded[0], padded[1], padded[2]),
            arguments=tuple(argument for argument, _ in present.values()),
            settles=settles,
        )
        key = launch.model_dump_json()
        self.order.append(
            self._tables.launches.setdefault(key, (len(self._tables.launches), launch))[0]
        )

    def elementwise(
        self, kernel: str, node: Node, names: tuple[str, ...], **constants: float
    ) -> None:
        """Launch an elementwise `kernel` from the inputs `names`, equally wide, to the output y.

        Each row is cut into pieces of 512 channels, 4 per thread.
        """
        views = [self.view(node.inputs[name]) for name in names]
        x = views[0]
        if any(view.width != x.width for view in views):
            widths = " and ".join(str(view.width) for view in views)
            raise ExportError(f"{node.op} has inputs of {widths} channels", field=node.name)
        y = self.new(node.outputs["y"], "f32", x.rows, x.width)
        strides = {f"{n.upper()}_STRIDE": v.stride for n, v in zip(names, views, strict=True)}
        self.launch(
            kernel,
            {**self.given(node, *names), "y": self.pointer(y)},
            {"WIDTH": x.width, **strides, **constants, "BLOCK": _PIECE},
            (Size(of=x.rows), Size(times=cdiv(x.width, _PIECE))),
            warps=4,
            stages=1,
        )


Lower = Callable[[Lowering, Node], None]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def warps_for(block: int) -> Warps:
    """Return the warps for `block` values of a row: 8 values a thread, two loads of 16 bytes."""
    return next((warps for warps in _WARPS if block >= 256 * warps), 1)


def _pointer_type(dtype: DType, offset: int) -> str:
    # every buffer is aligned to 256 bytes
    aligned = offset * ITEM_SIZE[dtype] % 16 == 0
    return f"*{_TRITON[dtype]}{':16' if aligned else ''}"
