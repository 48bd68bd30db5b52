"""Tool calls in XML, as some templates write them: one element per argument, strings unquoted.

    <tool_call>
    <function=go>
    <parameter=where>
    left
    </parameter>
    </function>
    </tool_call>

Qwen3-Coder, Qwen3.5 and Nemotron 3 do so. The words differ between templates and are found by
probing. Strings are written as they are, all other values as JSON; the schema tells which it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge.errors import InputError
from edge.text.tools import CallDelta, CallForm, CallReader, Declared, ToolCall, Written

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
# as JSON spells them, and as templates do that print Python's values
SPELLED: Mapping[str, Mapping[str, str]] = {
    "boolean": {"true": "true", "True": "true", "false": "false", "False": "false"},
    "null": {"null": "null", "None": "null"},
}
_KEYS, _VALUES = ("probe_key", "probe_other"), ("probe_value", "probe_more")
MAX_BRANCHES = 1000  # alternative schemas of one value
_EITHER = ("anyOf", "oneOf")
ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))  # that a probed template writes


@dataclass(frozen=True)
class XmlForm(CallForm):
    """A form that writes each argument as `opens`, its name, `named`, its value and `closes`."""

    opens: str
    named: str
    closes: str

    @property
    def trigger(self) -> str:
        """See `CallForm`."""
        return self.head.partition("\n")[0]

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See `CallForm`."""
        return self.head + self.joint.join(map(self._write_call, calls)) + self.tail

    def _write_call(self, call: ToolCall) -> str:
        arguments = call.arguments.items()
        parts = (f"{self.opens}{key}{self.named}{spelled(v)}{self.closes}" for key, v in arguments)
        return call.name + self.middle + "".join(parts)

    def reader(self, tools: Sequence[Declared]) -> CallReader:
        """See `CallForm`."""
        return XmlReader(self, tools)


def spelled(value: Any) -> str:
    """Return a value as it is written in an element."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def found(written: Written, names: Sequence[str]) -> XmlForm | None:
    """Return the form of a template that writes calls of these names, or None if it has another."""
    text, empty, pair = written(1, ARGUMENTS), written(1, {}), written(2, {})
    head, _, rest = text.partition(names[0])
    first, _, rest = rest.partition(_KEYS[0])
    named, _, rest = rest.partition(_VALUES[0])
    between, _, rest = rest.partition(_KEYS[1])
    last = rest.removeprefix(named + _VALUES[1])
    at = max(0, first.rfind("<"))
    middle, opens = first[:at], first[at:]
    closes = between.removesuffix(opens)
    tail = last.removeprefix(closes)
    joint = pair.removeprefix(head + names[0] + middle).partition(names[1])[0]
    form = XmlForm(head, middle, joint, tail, opens, named, closes)
    calls = [ToolCall("", name, "{}") for name in names]
    call = ToolCall("", names[0], json.dumps(ARGUMENTS))
    complete = all((head, middle, opens, named, closes, tail))
    if not complete or [form.write([call]), form.write(calls[:1])] != [text, empty]:
        return None
    return form if form.write(calls) == pair else replace(form, joint="")


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, with its reference within `root` resolved."""
    for _ in range(8):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target: Any = root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**target, **rest} if isinstance(target, Mapping) else {}
    return {}


def branches(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternative schemas of a value: each has one type, or lists values.

    Raises InputError when there are more than MAX_BRANCHES, or infinitely many.
    """
    alternatives: list[Mapping[str, Any]] = []
    pending = [schema]
    for _ in range(MAX_BRANCHES):
        if not pending:
            return alternatives
        current = resolved(pending.pop(), root)
        nested = next((current[key] for key in _EITHER if isinstance(current.get(key), list)), None)
        if nested is not None:
            pending += reversed(nested)
        elif "const" in current:
            alternatives.append({"enum": [current["const"]]})
        elif isinstance(current.get("enum"), list):
            alternatives.append({"enum": current["enum"]})
        else:
            types = current.get("type", sorted(TYPES))
            alternatives += [
                {**current, "type": kind} for kind in ([types] if isinstance(types, str) else types)
            ]
    raise InputError(f"has more than {MAX_BRANCHES} schemas to choose from")


def _allowed_types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a value may have."""
    out = set()
    for branch in branches(schema, root):
        out |= set(map(_json_type, branch["enum"])) if "enum" in branch else {branch["type"]}
    return out | ({"integer"} if "number" in out else set())


def _json_type(value: Any) -> str:
    """Return the type of a value as JSON Schema names it."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


class XmlReader(CallReader):
    """Turns arguments into JSON while they are streamed."""

    def __init__(self, form: XmlForm, tools: Sequence[Declared]) -> None:
        super().__init__(form)
        self._xml = form
        self._schemas = {
            tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools
        }
        self._allowed: set[str] = set()
        self._quoting = False

    def _arguments(self) -> str:
        held, opens = self._held, self._xml.opens
        if held.startswith(opens):
            self._take(len(opens))
            self._step = self._key
        elif not opens.startswith(held):
            self._append("}" if self._source else "{}")
            self.calls.append(ToolCall(self._id, self._name, self._source))
            self._step = self._after
        return ""

    def _key(self) -> str:
        at = self._find(self._xml.named)
        if at >= 0:
            key = self._take(at)
            self._take(len(self._xml.named))
            root = self._schemas.get(self._name, {})
            self._allowed = _allowed_types(root.get("properties", {}).get(key, {}), root)
            self._append(
                (", " if self._source else "{") + json.dumps(key, ensure_ascii=False) + ": "
            )
            self._step, self._quoting = self._value, False
        return ""

    def _value(self) -> str:
        closes = self._xml.closes
        at = self._find(closes)
        if self._allowed == {"string"}:  # passed on as it arrives
            self._quote(self._take(self._begun(closes) if at < 0 else at), ended=at >= 0)
        elif at >= 0:
            self._append(self._to_json(self._take(at)))
        if at >= 0:
            self._take(len(closes))
            self._step = self._arguments
        return ""

    def _quote(self, text: str, *, ended: bool) -> None:
        """Write more of a string, or its last part."""
        started, self._quoting = self._quoting, True
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        self._append(("" if started else '"') + escaped + ('"' if ended else ""))

    def _to_json(self, text: str) -> str:
        """Return the JSON of a value whose schema allows more than strings."""
        for kind, words in SPELLED.items():
            if kind in self._allowed and text in words:
                return words[text]
        try:
            if _json_type(json.loads(text)) in self._allowed - {"string"}:
                return text
        except (ValueError, RecursionError):
            pass
        return json.dumps(text, ensure_ascii=False)

    def _append(self, text: str) -> None:
        self._source += text
        if text:
            self.deltas.append(CallDelta(len(self.calls), text))
