"""What an op is stated in: typed values with symbolic shapes, attributes, maths, source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

DOMAIN = "edge"
VERSION = 1

Role = Literal["value", "weight", "state", "index"]
_TYPED = re.compile(r"^(?P<dtype>f32|f16|i8|u8|i32|i64|bool)\[(?P<shape>[^\]]*)\]$")


@dataclass(frozen=True)
class Value:
    """One input or output.

    Attributes:
        name: as it stands in node signatures.
        dtypes: what it may be: f32, f16, i8, u8, i32, i64, bool. The first is the usual one.
        shape: one symbol or number a dimension, products written `G·N`; () is a scalar.
        role: `state` is carried between runs, `weight` is constant, `index` steers, `value` flows.
        doc: what it holds.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[str, ...]
    role: Role
    doc: str


@dataclass(frozen=True)
class Attribute:
    """A compile-time constant of a node."""

    name: str
    kind: Literal["int", "float"]
    doc: str


@dataclass(frozen=True)
class Op:
    """An op of the domain `edge`, stated once; every implementation is held to this.

    Attributes:
        maths: the definition, one line an equation.
        source: paper and equation, or file, that it comes from.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: tuple[Attribute, ...]
    maths: str
    source: str

    def states(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the states that go in, and of the states that come out."""
        return (
            tuple(v.name for v in self.inputs if v.role == "state"),
            tuple(v.name for v in self.outputs if v.role == "state"),
        )


def value(name: str, typed: str, doc: str, role: Role = "value") -> Value:
    """`value("x", "f32[T,B,E]", …)`; alternatives are written `f32|f16[O,I]`."""
    kinds, bracket, rest = typed.partition("[")
    dtypes = tuple(kinds.split("|"))
    for dtype in dtypes:
        if not _TYPED.match(dtype + bracket + rest):
            raise ValueError(f"{name}: {typed!r} is not a type")
    shape = tuple(part.strip() for part in rest[:-1].split(",") if part.strip())
    return Value(name, dtypes, shape, role, doc)


def weight(name: str, typed: str, doc: str) -> Value:
    return value(name, typed, doc, "weight")


def state(name: str, typed: str, doc: str) -> Value:
    return value(name, typed, doc, "state")


def index(name: str, typed: str, doc: str) -> Value:
    return value(name, typed, doc, "index")
