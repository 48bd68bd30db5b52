"""Build a `FunctionProto` from an op's statement and the text of its body."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, Literal

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, helper
from onnx.parser import parse_function

from edge.ops import DOMAIN, Form, Op
from edge.plugins.catalogue import OPS, home, parts, snake

Flavour = Literal["standard", "ort"]
FLAVOURS: tuple[Flavour, ...] = ("standard", "ort")
# 21 is the newest opset of ONNX Runtime 1.20 and still current in 1.23.2, the last for Python 3.10.
OPSETS = {"": 21, "com.microsoft": 1}
# IR 10 is the newest that ONNX Runtime 1.23 reads.
IR_VERSION = 10


def names(flavour: Flavour = "ort") -> tuple[str, ...]:
    """Return the names of all functions that have a body of this flavour."""
    return tuple(
        name
        for op in OPS.values()
        for name, form in op.forms().items()
        if _body(op, name, form, flavour) is not None
    )


def op_of(name: str) -> Op:
    """Return the op a function implements: `EmbedBits_4` → `EmbedBits`."""
    return OPS[name.partition("_")[0]]


def inputs_of(node: NodeProto) -> dict[str, str]:
    """Return the values that an `edge` node reads, by their names in the statement."""
    pairs = zip(op_of(node.op_type).inputs, node.input, strict=False)
    return {v.name: read for v, read in pairs}


@cache
def function(name: str, flavour: Flavour = "standard") -> FunctionProto:
    """Return the function `edge::name`, in a body for ONNX Runtime or of standard ONNX ops only.

    Both flavours implement the statement. The device graph calls `standard`, and only ops that it
    calls have that flavour. Raises KeyError for others.
    """
    op = op_of(name)
    body = _body(op, name, op.forms()[name], flavour)
    if body is None:
        raise KeyError(f"{name} has no {flavour} body")
    domains = OPSETS if "com.microsoft." in body else {"": OPSETS[""]}
    return parsed(op, name, body, DOMAIN, domains)


def _body(op: Op, name: str, form: Form, flavour: Flavour) -> str | None:
    """Return the text of a body for this form and flavour, or None."""
    module = parts("body")[home(op.name)]
    for prefix in ("ort_", "") if flavour == "ort" else ("",):
        text = body_in(module, prefix, name, op.name, {**form, "ort": flavour == "ort"})
        if text is not None:
            return text
    return None


def body_in(
    module: ModuleType, prefix: str, name: str, op: str, given: Mapping[str, Any]
) -> str | None:
    """Return the text of a body from a module, or None.

    This is a constant named like the function or the op, else the result of calling a function
    named like the op, or `body`, with the parameters it takes from `given`.
    """
    for candidate in (name, op):
        text = getattr(module, f"{prefix}{snake(candidate)}".upper(), None)
        if isinstance(text, str):
            return text
    builder = getattr(module, f"{prefix}{snake(op)}", None) or getattr(
        module, f"{prefix}body", None
    )
    if builder is None:
        return None
    given = {**given, "op": op}
    parameters = inspect.signature(builder).parameters
    return str(builder(**{key: value for key, value in given.items() if key in parameters}))


def parsed(op: Op, name: str, body: str, domain: str, domains: Mapping[str, int]) -> FunctionProto:
    """Parse the function `domain::name` with the signature of `op`, which uses ops of `domains`."""
    imports = ", ".join(f'"{imported}" : {version}' for imported, version in domains.items())
    attributes = ", ".join(f"{a.name}: {a.kind}" for a in op.attributes)
    signature = (
        f"{name} {f'<{attributes}>' if attributes else ''} "
        f"({', '.join(v.name for v in op.inputs)}) => ({', '.join(v.name for v in op.outputs)})"
    )
    header = f'<domain: "{domain}", opset_import: [{imports}]>'
    proto = parse_function(f"{header}\n{signature} {{{body}}}")
    # The parser files attributes without a default under attribute_proto; IR wants names.
    del proto.attribute_proto[:]
    proto.attribute.extend(a.name for a in op.attributes)
    proto.doc_string = f"{op.maths}\n\nSource: {op.source}"
    return proto


def model_of(
    graph: GraphProto, functions: Iterable[FunctionProto], own: Mapping[str, int]
) -> ModelProto:
    """Make a model that uses standard ONNX, the domains in `own` (→ version), and `functions`."""
    protos = list(functions)
    imports = {"": OPSETS[""], **own}
    for proto in protos:
        imports |= {entry.domain: entry.version for entry in proto.opset_import}
    return helper.make_model(
        graph,
        functions=protos,
        producer_name="edge",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid(domain, at) for domain, at in imports.items()],
    )
