"""Makes a `FunctionProto` of an op's statement and its body's text."""

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
    """Every function that has a body of this flavour."""
    return tuple(
        name
        for op in OPS.values()
        for name, form in op.forms().items()
        if _body(op, name, form, flavour) is not None
    )


def op_of(name: str) -> Op:
    """The op a function implements: `EmbedBits_4` → `EmbedBits`."""
    return OPS[name.partition("_")[0]]


def inputs_of(node: NodeProto) -> dict[str, str]:
    """The values that an `edge` node reads, by the statement's names."""
    found = zip(op_of(node.op_type).inputs, node.input, strict=False)
    return {v.name: read for v, read in found}


@cache
def function(name: str, flavour: Flavour = "standard") -> FunctionProto:
    """The function `edge::name`: as ONNX Runtime runs it fastest, or of ONNX's own ops alone.

    The flavours agree on everything the statement says. `standard` is what the device graph calls,
    and only ops that it calls have it: KeyError for others.
    """
    op = op_of(name)
    body = _body(op, name, op.forms()[name], flavour)
    if body is None:
        raise KeyError(f"{name} has no {flavour} body")
    domains = OPSETS if "com.microsoft." in body else {"": OPSETS[""]}
    return parsed(op, name, body, DOMAIN, domains)


def _body(op: Op, name: str, form: Form, flavour: Flavour) -> str | None:
    """The text, or what the function that is called as the op makes for the form."""
    module = parts("body")[home(op.name)]
    for prefix in ("ort_", "") if flavour == "ort" else ("",):
        found = body_in(module, prefix, name, op.name, {**form, "ort": flavour == "ort"})
        if found is not None:
            return found
    return None


def body_in(
    module: ModuleType, prefix: str, name: str, op: str, given: Mapping[str, Any]
) -> str | None:
    """A constant called as the function or the op; or what a function called so, or `body`, makes
    of `given`.
    """
    for called in (name, op):
        text = getattr(module, f"{prefix}{snake(called)}".upper(), None)
        if isinstance(text, str):
            return text
    made = getattr(module, f"{prefix}{snake(op)}", None) or getattr(module, f"{prefix}body", None)
    if made is None:
        return None
    given = {**given, "op": op}
    asked = inspect.signature(made).parameters
    return str(made(**{each: value for each, value in given.items() if each in asked}))


def parsed(op: Op, name: str, body: str, domain: str, domains: Mapping[str, int]) -> FunctionProto:
    """The function `domain::name` with the signature of `op`, which uses ops of `domains`."""
    imports = ", ".join(f'"{each}" : {version}' for each, version in domains.items())
    attributes = ", ".join(f"{a.name}: {a.kind}" for a in op.attributes)
    signature = (
        f"{name} {f'<{attributes}>' if attributes else ''} "
        f"({', '.join(v.name for v in op.inputs)}) => ({', '.join(v.name for v in op.outputs)})"
    )
    header = f'<domain: "{domain}", opset_import: [{imports}]>'
    made = parse_function(f"{header}\n{signature} {{{body}}}")
    # The parser files attributes without a default under attribute_proto; IR wants names.
    del made.attribute_proto[:]
    made.attribute.extend(a.name for a in op.attributes)
    made.doc_string = f"{op.maths}\n\nSource: {op.source}"
    return made


def model_of(
    graph: GraphProto, functions: Iterable[FunctionProto], own: Mapping[str, int]
) -> ModelProto:
    """A model of ONNX's ops, those of the domains `own` (→ version), and what `functions` use."""
    found = list(functions)
    imports = {"": OPSETS[""], **own}
    for each in found:
        imports |= {entry.domain: entry.version for entry in each.opset_import}
    return helper.make_model(
        graph,
        functions=found,
        producer_name="edge",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid(domain, at) for domain, at in imports.items()],
    )
