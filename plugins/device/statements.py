"""The statements of all device ops by function name, one for each form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from edge.ops import Form, Op
from edge.plugins.catalogue import ops_in, parts
from edge.plugins.device.rules import stateless


def _statements() -> Iterator[tuple[str, Op]]:
    """Yield every device op with its folder."""
    devices = parts("device")
    for folder in sorted({*parts("statement"), *devices}):
        own_statements = getattr(devices.get(folder), "statements", None)
        ops = own_statements() if own_statements else map(stateless, ops_in(folder))
        yield from ((folder, op) for op in ops)


_STATEMENTS = {op.name: (folder, op) for folder, op in _statements()}
_FORMS = {
    name: (folder, op, form)
    for folder, op in _STATEMENTS.values()
    for name, form in op.forms().items()
}
DEVICE_OPS: dict[str, Op] = {name: replace(op, name=name) for name, (_, op, _) in _FORMS.items()}


def device_name(op: str, attributes: Mapping[str, float]) -> str:
    """Return the device op of a planned node. A norm with the attribute `rows` set picks rows."""
    return f"{op}Rows" if attributes.get("rows") else _STATEMENTS[op][1].function(attributes)


def form_of(name: str) -> tuple[str, Op, Form]:
    """Return the folder of a device op, the statement it is a form of, and the form."""
    return _FORMS[name]


def in_place(op: Op) -> dict[str, str]:
    """Return the outputs that share an input's memory: output → input."""
    inputs = {v.name for v in op.inputs}
    outputs = (v.name for v in op.outputs if v.name.endswith("_out"))
    return {name: name.removesuffix("_out") for name in outputs if name[:-4] in inputs}


def viewable(op: Op) -> tuple[str, ...]:
    """Return the inputs that may be columns of a wider tensor."""
    attributes = {a.name for a in op.attributes}
    return tuple(v.name for v in op.inputs if f"{v.name}_start" in attributes)
