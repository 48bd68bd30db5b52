"""What an op is stated in: typed values with symbolic shapes, attributes, maths, source.

The statements themselves are in `edge.plugins`, a folder an op; `edge.plugins.catalogue.OPS` has
all of them. Symbols are those of `edge.config`; activations are time-major ([T, B, …]); R is the
number of kept rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DOMAIN, VERSION = "edge", 1
# the ops as a GPU runs them: nodes of `graphs/tensorrt.onnx`
DEVICE_DOMAIN, DEVICE_VERSION = "edge.device", 1
# before a device op's name, a plugin's: TensorRT's parser takes `Gelu` of any domain for ONNX's
PLUGIN_PREFIX = "Edge"

Role = Literal["value", "weight", "state", "index"]
Form = Mapping[str, int | None]
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
    """A compile-time constant of a node.

    Attributes:
        forms: values for which the op's function has a body of its own, and None where there is
            one for all others; empty where one body serves every value.
        absent: what a node means that does not say it, as one that was written before there was
            this attribute. None: every node says it.
    """

    name: str
    kind: Literal["int", "float"]
    doc: str
    forms: tuple[int | None, ...] = ()
    absent: int | None = None


@dataclass(frozen=True)
class Op:
    """An op, stated once; every implementation is held to this.

    Attributes:
        maths: the definition, one line an equation.
        source: paper and equation, or file, that it comes from.
        tail: end of the name that comes behind the numbers of a form: `Dt` of
            `SelectiveScanInt8_16Dt`.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: tuple[Attribute, ...]
    maths: str
    source: str
    tail: str = ""

    def states(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the states that go in, and of the states that come out."""
        return (
            tuple(v.name for v in self.inputs if v.role == "state"),
            tuple(v.name for v in self.outputs if v.role == "state"),
        )

    def only(self, *names: str) -> tuple[Value, ...]:
        """The inputs of these names, in their order here."""
        return tuple(v for v in self.inputs if v.name in names)

    def without(self, *names: str) -> tuple[Value, ...]:
        """All other inputs."""
        return tuple(v for v in self.inputs if v.name not in names)

    def forms(self) -> dict[str, Form]:
        """The functions that implement the op: name → the attribute values it is made for.

        ONNX Runtime 1.23 does not tell FunctionProto.overload apart, so every form has a name:
        `EmbedBits_4`, or `SelectiveScanHeads_1` beside `SelectiveScanHeads` for other `groups`.
        """
        attributes = self._formed()
        every = itertools.product(*(a.forms for a in attributes))
        forms = [dict(zip((a.name for a in attributes), one, strict=True)) for one in every]
        return {self._name(form): form for form in forms}

    def function(self, attributes: Mapping[str, float]) -> str:
        """The function that implements the op for these attribute values."""
        chosen = {a.name: int(attributes[a.name]) for a in self._formed()}
        return self._name(
            {a.name: chosen[a.name] if chosen[a.name] in a.forms else None for a in self._formed()}
        )

    def _formed(self) -> list[Attribute]:
        """Those with forms; what every form has a number for comes first."""
        return sorted((a for a in self.attributes if a.forms), key=lambda a: None in a.forms)

    def _name(self, form: Form) -> str:
        numbers = "".join(f"_{value}" for value in form.values() if value is not None)
        return f"{self.name.removesuffix(self.tail)}{numbers}{self.tail}"


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
