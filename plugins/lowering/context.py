"""What a lowering sees of its node, and how it asks for memory and launches."""

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
_LONGEST = 128
_PIECE = 512
_WARPS: tuple[Warps, ...] = (16, 8, 4, 2, 1)
ONE = Size()
# A kernel's run-time arguments with their Triton types, in its order; None is not there.
Arguments = Mapping[str, tuple[Argument, str] | None]


@dataclass(frozen=True)
class Node:
    """One node of the graph: `op` is the `edge` op's name, or that of a standard ONNX op.

    Attributes:
        inputs, outputs: the statement's names (ONNX's, for its own ops) → values of the graph.
        pair: names of the nodes that it is of, where it is one because there are few rows.
    """

    op: str
    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    attributes: Mapping[str, Any]
    pair: tuple[str, ...] = ()

    @property
    def int8(self) -> bool:
        """Whether the op is one on int8 values."""
        return "Int8" in self.op


@dataclass(frozen=True)
class View:
    """Rows of channels in a buffer: element (row, c) is at `offset + row·stride + c`.

    Attributes:
        rows: how many there are: "TB" (row t·B+b) or "LB".
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
        """Whether every row starts on 16 bytes."""
        item = ITEM_SIZE[self.dtype]
        return self.offset * item % 16 == 0 and self.stride * item % 16 == 0


@dataclass(frozen=True)
class Constant:
    """An initializer: what is known of it when the plan is made.

    Attributes:
        space: `weight` in weights.bin, `inline` in the graph.
        array: reads it.
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
    """Which program is being made. `max_rows` None: any number of rows, made for many."""

    kind: Literal["chain", "tree"]
    max_rows: int | None

    @property
    def many(self) -> bool:
        return self.max_rows is None


@dataclass
class Tables:
    """What all programs of a plan share, filled by the lowerings."""

    variants: dict[str, tuple[int, Variant]] = field(default_factory=dict)
    launches: dict[str, tuple[int, Launch]] = field(default_factory=dict)
    values: dict[str, Buffer] = field(default_factory=dict)
    inputs: dict[str, Buffer] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    inline: dict[str, Inline] = field(default_factory=dict)
    logs: dict[str, Log] = field(default_factory=dict)


class Lowering:
    """One program in the making. A lowering is a function of this and a node.

    Attributes:
        regime: see `Regime`.
        views: value name → where it is; a lowering adds its node's outputs.
        constants: initializers by name.
        order: launches so far, as indices.
    """

    def __init__(self, regime: Regime, tables: Tables, constants: Mapping[str, Constant]) -> None:
        self.regime = regime
        self.views: dict[str, View] = {}
        self.constants = constants
        self.order: list[int] = []
        self._tables = tables

    # -- values ----------------------------------------------------------------------------------

    def view(self, name: str) -> View:
        """The place of a value made by an earlier node. Raises ExportError when none made it."""
        if name not in self.views:
            raise ExportError(f"no kernel makes the value {name!r}", field=name)
        return self.views[name]

    def constant(self, name: str) -> Constant:
        if name not in self.constants:
            raise ExportError(f"{name!r} is not a constant of the graph", field=name)
        return self.constants[name]

    def known(self, node: Node, name: str) -> Constant | None:
        """An input that is a constant; None where the op has none of that name."""
        return self.constant(node.inputs[name]) if name in node.inputs else None

    def count(self, node: Node, name: str) -> int:
        """How many numbers a constant has: 1 or one a channel of a scale, 0 where there is none."""
        known = self.known(node, name)
        return 0 if known is None else known.size

    def new(self, name: str, dtype: DType, rows: Rows, width: int) -> View:
        """A buffer of the arena for the value `name`, rows one after the other."""
        buffer = Buffer(dtype=dtype, elements=Size(times=width, of=rows))
        if self._tables.values.setdefault(name, buffer) != buffer:
            raise ExportError(f"the value {name!r} has two forms", field=name)
        self.views[name] = View(name, dtype, rows, width, width)
        return self.views[name]

    # -- arguments -------------------------------------------------------------------------------

    @overload
    def pointer(self, what: View | Constant) -> tuple[Pointer, str]: ...

    @overload
    def pointer(self, what: None) -> None: ...

    def pointer(self, what: View | Constant | None) -> tuple[Pointer, str] | None:
        """A value or constant as an argument; None is not there (see `launch`)."""
        if what is None:
            return None
        if isinstance(what, View):
            pointer = Pointer(space="value", name=what.buffer, at=what.offset)
            return pointer, _pointer_type(what.dtype, what.offset)
        entry = self._declare(what)
        return Pointer(space=what.space, name=entry), _pointer_type(what.dtype, 0)

    def given(self, node: Node, *names: str, **called: str) -> Arguments:
        """Inputs as arguments, called as in the statement; `called`: argument → input.

        One that the op does not have is None.
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
            # lists of channels are called after all of them: names of any length
            name = constant.name
            if len(name) > _LONGEST:
                name = f"{name[:_LONGEST]}…{hashlib.sha256(name.encode()).hexdigest()[:16]}"
            self._tables.inline[name] = Inline(dtype=constant.dtype, data=data)
            return name
        if constant.name not in self._tables.weights:
            raise ExportError(f"{constant.name!r} is not in weights.bin", field=constant.name)
        return constant.name

    def input(self, name: str, dtype: DType, elements: Size) -> tuple[Pointer, str]:
        """An array that the host writes before each run: `run`, `tokens`, `taps4`, …"""
        buffer = Buffer(dtype=dtype, elements=elements)
        if self._tables.inputs.setdefault(name, buffer) != buffer:
            raise ExportError(f"the input {name!r} has two forms", field=name)
        return Pointer(space="input", name=name), _pointer_type(dtype, 0)

    def run(self) -> tuple[Pointer, str]:
        """The fields `edge.launch.RUN_FIELDS`, i32."""
        return self.input("run", "i32", Size(times=8))

    def replay(self) -> tuple[Pointer, str]:
        """Log slots of the tokens to replay, oldest first, i32[S]; run[PENDING] are valid."""
        return self.input("replay", "i32", Size(of="S"))

    def slots(self) -> tuple[Pointer, str]:
        """Log slot to keep each new token in, i32[T]; -1 for none."""
        return self.input("slots", "i32", Size(of="T"))

    def ancestors(self) -> tuple[Pointer, str]:
        """i32[T,T]: [t,j] is 1 when token j is t or on its path. Written for chains too."""
        return self.input("ancestors", "i32", Size(of="TT"))

    def taps(self, width: int) -> dict[str, tuple[Pointer, str]]:
        """Rows of [state slot: K-1 | log: S | x: T] that tokens read, i32[T,K], and those that are
        the stored state, i32[K-1].
        """
        return {
            "taps": self.input(f"taps{width}", "i32", Size(times=width, of="T")),
            "state_taps": self.input(f"state_taps{width}", "i32", Size(times=width - 1)),
        }

    def state(self, name: str, dtype: DType) -> tuple[Pointer, str]:
        """Both slots [2, …slot shape] of `layers.i.ssm_state` or `layers.i.conv_state`."""
        return Pointer(space="state", name=name), _pointer_type(dtype, 0)

    def cache(self, name: str, dtype: DType) -> tuple[Pointer, str]:
        """[B, KV heads, C, P]."""
        return Pointer(space="cache", name=name), _pointer_type(dtype, 0)

    def log(self, state: str, of: str, dtype: DType, width: int) -> tuple[Pointer, str]:
        """The log `of` beside a layer's state, [S, B, width]: rows of the slot s are s·B+b."""
        layer, dot, _ = state.rpartition(".")
        name = f"{layer}{dot}{of}"
        log = Log(dtype=dtype, width=width)
        if self._tables.logs.setdefault(name, log) != log:
            raise ExportError(f"the log {name!r} has two forms", field=name)
        return Pointer(space="log", name=name), _pointer_type(dtype, 0)

    def size(self, of: str, times: int = 1, per: int = 1) -> tuple[Size, str]:
        """An integer argument, i32: `size("TB")` is the number of rows."""
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
        """Append a launch. `arguments` are in the kernel's own order; see `Launch`, `Variant`.

        One that is None is not there: the kernel is compiled with None in its place.
        """
        given = {name: one for name, one in arguments.items() if one is not None}
        absent = dict.fromkeys(name for name, one in arguments.items() if one is None)
        variant = Variant(
            kernel=kernel,
            arguments=tuple(given),
            types=tuple(kind for _, kind in given.values()),
            constants={**absent, **constants},
            warps=warps,
            stages=stages,
        )
        number = self._tables.variants.setdefault(
            variant.key, (len(self._tables.variants), variant)
        )[0]
        full = (*grid, ONE, ONE)[:3]
        launch = Launch(
            variant=number,
            grid=(full[0], full[1], full[2]),
            arguments=tuple(argument for argument, _ in given.values()),
            settles=settles,
        )
        key = launch.model_dump_json()
        self.order.append(
            self._tables.launches.setdefault(key, (len(self._tables.launches), launch))[0]
        )

    def elementwise(
        self, kernel: str, node: Node, names: tuple[str, ...], **constants: float
    ) -> None:
        """Launch `kernel` on equally wide rows of the inputs `names`, for the output y: every row
        in pieces of 512 channels, 4 a thread.
        """
        views = [self.view(node.inputs[name]) for name in names]
        x = views[0]
        if any(view.width != x.width for view in views):
            widths = " and ".join(str(view.width) for view in views)
            raise ExportError(f"{node.op} of {widths} values", field=node.name)
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
    """Warps for `block` values of one row: 8 values a thread, two loads of 16 bytes."""
    return next((warps for warps in _WARPS if block >= 256 * warps), 1)


def _pointer_type(dtype: DType, offset: int) -> str:
    """Every buffer starts on 256 bytes."""
    aligned = offset * ITEM_SIZE[dtype] % 16 == 0
    return f"*{_TRITON[dtype]}{':16' if aligned else ''}"
