"""Build the `FunctionProto` of a device op from its statement and the text of its body."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from onnx import FunctionProto

from edge.ops import DEVICE_DOMAIN, DEVICE_VERSION, DOMAIN, VERSION
from edge.plugins.catalogue import OPS, parts
from edge.plugins.device.statements import DEVICE_OPS, form_of, viewable
from edge.plugins.device.text import on_views
from edge.plugins.onnx.library import OPSETS, body_in, function, parsed

_DOMAINS = {"": OPSETS[""], DOMAIN: VERSION, DEVICE_DOMAIN: DEVICE_VERSION}


@cache
def device_function(name: str) -> FunctionProto:
    """Return the function `edge.device::{name}`, made of standard ONNX ops and other functions."""
    op = DEVICE_OPS[name]
    return parsed(op, name, _body(name), DEVICE_DOMAIN, _DOMAINS)


def _body(name: str) -> str:
    """Return the body in the folder's `device.py`, else the functional op on columns of inputs."""
    folder, op, form = form_of(name)
    module = parts("device").get(folder)
    body = body_in(module, "", name, op.name, form) if module else None
    return on_views(name, OPS[op.name], viewable(op)) if body is None else body


def device_functions(names: Iterable[str]) -> list[FunctionProto]:
    """Return the functions of these device ops and of all ops they call, for a model."""
    functions: dict[tuple[str, str], FunctionProto] = {}
    pending = [(DEVICE_DOMAIN, name) for name in names]
    while pending:
        domain, name = key = pending.pop()
        if key not in functions:
            functions[key] = device_function(name) if domain == DEVICE_DOMAIN else function(name)
            calls = ((node.domain, node.op_type) for node in functions[key].node)
            pending += [call for call in calls if call[0] in (DOMAIN, DEVICE_DOMAIN)]
    return [functions[key] for key in sorted(functions)]
