"""The parts of an op's statement: typed values with symbolic shapes, attributes, maths, source.

The statements themselves are in `edge.plugins`, one folder per op; `edge.plugins.catalogue.OPS`
lists all of them. Symbols are those of `edge.config`; activations are time-major ([T, B, …]); R is
the number of kept rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DOMAIN, VERSION = "edge", 1
# the ops in the form that a GPU runs: nodes of `graphs/tensorrt.onnx`
DEVICE_DOMAIN, DEVICE_VERSION = "edge.device", 1
# makes a device op's name a plugin's: TensorRT's parser takes `Gelu` of any domain for ONNX's
PLUGIN_PREFIX = "Edge"

Role = Literal["value", "weight", "state", "index"]
Form = Mapping[str, int | None]
_TYPED = re.compile(r"^(?P<dtype>f32|f16|i8|u8|i32|i64|bool)\[(?P<shape>[^\]]*)\]$")


@dataclass(frozen=True)
class Value:
    """One input or output.

    Attributes:
        name: name in node signatures.
        dtypes: allowed types, of f32, f16, i8, u8, i32, i64, bool. The first is the usual one.
        shape: one symbol or number per dimension, products written `G·N`; () is a scalar.
        role: carried between runs (`state`), constant (`weight`), control (`index`), or data
            (`value`).
        doc: meaning of the value.
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
        forms: values for which the op has a function of its own, with None for a function that
            serves all others; empty if one function serves every value.
        absent: value assumed for nodes without it, written before the attribute existed. None
            means that every node has it.
    """

    name: str
    kind: Literal["int", "float"]
    doc: str
    forms: tuple[int | None, ...] = ()
    absent: int | None = None


@dataclass(frozen=True)
class Op:
    """An op, stated once; every implementation must conform to it.

    Attributes:
        maths: definition, one equation per line.
        source: paper and equation, or file, that it comes from.
        tail: end of the name, placed after the numbers of a form: `Dt` in
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
        """Return the names of the input states and of the output states."""
        return (
            tuple(v.name for v in self.inputs if v.role == "state"),
            tuple(v.name for v in self.outputs if v.role == "state"),
        )

    def only(self, *names: str) -> tuple[Value, ...]:
        """Return the inputs with these names, in the op's order."""
        return tuple(v for v in self.inputs if v.name in names)

    def without(self, *names: str) -> tuple[Value, ...]:
        """Return the inputs without these names."""
        return tuple(v for v in self.inputs if v.name not in names)

    def forms(self) -> dict[str, Form]:
        """Return the functions that implement the op: name → its attribute values.

        ONNX Runtime 1.23 ignores FunctionProto.overload, so every form has its own name:
        `EmbedBits_4`, or `SelectiveScanHeads_1` beside `SelectiveScanHeads` for other `groups`.
        """
        attributes = self._attributes_with_forms()
        combinations = itertools.product(*(a.forms for a in attributes))
        forms = [
            dict(zip((a.name for a in attributes), combination, strict=True))
            for combination in combinations
        ]
        return {self._function_name(form): form for form in forms}

    def function(self, attributes: Mapping[str, float]) -> str:
        """Return the name of the function that implements the op for these attribute values."""
        chosen = {a.name: int(attributes[a.name]) for a in self._attributes_with_forms()}
        return self._function_name(
            {
                a.name: chosen[a.name] if chosen[a.name] in a.forms else None
                for a in self._attributes_with_forms()
            }
        )

    def _attributes_with_forms(self) -> list[Attribute]:
        """Return the attributes with forms; those with a number in every form come first."""
        return sorted((a for a in self.attributes if a.forms), key=lambda a: None in a.forms)

    def _function_name(self, form: Form) -> str:
        numbers = "".join(f"_{value}" for value in form.values() if value is not None)
        return f"{self.name.removesuffix(self.tail)}{numbers}{self.tail}"


def value(name: str, typed: str, doc: str, role: Role = "value") -> Value:
    """Build a Value: `value("x", "f32[T,B,E]", …)`; alternatives are written `f32|f16[O,I]`."""
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
