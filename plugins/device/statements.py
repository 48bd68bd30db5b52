"""The statement of every device op, by function name: one for each form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from onnx import FunctionProto

from edge.ops import DEVICE_DOMAIN, DEVICE_VERSION, DOMAIN, VERSION, Form, Op
from edge.plugins.catalogue import OPS, ops_in, parts
from edge.plugins.device.rules import stateless
from edge.plugins.device.text import on_views
from edge.plugins.onnx.library import OPSETS, body_in, function, parsed


def _statements() -> Iterator[tuple[str, Op]]:
    """With the folder of each."""
    devices = parts("device")
    for folder in sorted({*parts("statement"), *devices}):
        stated = getattr(devices.get(folder), "statements", None)
        found = stated() if stated else map(stateless, ops_in(folder))
        yield from ((folder, op) for op in found)


_STATED = {op.name: (folder, op) for folder, op in _statements()}
_FORMS = {
    name: (folder, op, form) for folder, op in _STATED.values() for name, form in op.forms().items()
}
DEVICE_OPS: dict[str, Op] = {name: replace(op, name=name) for name, (_, op, _) in _FORMS.items()}


def device_name(op: str, attributes: Mapping[str, float]) -> str:
    """The device op of a planned node. A norm with the attribute `rows` set picks rows."""
    return f"{op}Rows" if attributes.get("rows") else _STATED[op][1].function(attributes)


def form_of(name: str) -> tuple[str, Op, Form]:
    """The folder of a device op, the statement it is a form of, and the form."""
    return _FORMS[name]


def in_place(op: Op) -> dict[str, str]:
    """Outputs that are an input's memory: output → input."""
    inputs = {v.name for v in op.inputs}
    outputs = (v.name for v in op.outputs if v.name.endswith("_out"))
    return {name: name.removesuffix("_out") for name in outputs if name[:-4] in inputs}


def viewable(op: Op) -> tuple[str, ...]:
    """Inputs that may be columns of a wider tensor."""
    attributes = {a.name for a in op.attributes}
    return tuple(v.name for v in op.inputs if f"{v.name}_start" in attributes)


_DOMAINS = {"": OPSETS[""], DOMAIN: VERSION, DEVICE_DOMAIN: DEVICE_VERSION}


@cache
def device_function(name: str) -> FunctionProto:
    """The function `edge.device::{name}`, of ONNX's own ops and of functions that it calls."""
    op = DEVICE_OPS[name]
    return parsed(op, name, _body(name), DEVICE_DOMAIN, _DOMAINS)


def _body(name: str) -> str:
    """That of the folder's `device.py`, else the functional op on columns of values."""
    folder, op, form = form_of(name)
    module = parts("device").get(folder)
    own = body_in(module, "", name, op.name, form) if module else None
    return on_views(name, OPS[op.name], viewable(op)) if own is None else own


def device_functions(names: Iterable[str]) -> list[FunctionProto]:
    """The functions of these device ops, and all that they call: what a model needs to have."""
    found: dict[tuple[str, str], FunctionProto] = {}
    waiting = [(DEVICE_DOMAIN, name) for name in names]
    while waiting:
        domain, name = one = waiting.pop()
        if one not in found:
            found[one] = device_function(name) if domain == DEVICE_DOMAIN else function(name)
            calls = ((node.domain, node.op_type) for node in found[one].node)
            waiting += [call for call in calls if call[0] in (DOMAIN, DEVICE_DOMAIN)]
    return [found[one] for one in sorted(found)]
