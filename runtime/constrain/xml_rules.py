"""Grammar rules for tool-call arguments written as XML elements, each with its own schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from edge.errors import InputError
from edge.runtime.constrain.mask import literal
from edge.text.xml_calls import SPELLED, XmlForm, branches, resolved, spelled

# supported keywords of the arguments' schema and of a string's; others are ignored, or refused
# with `strict`
_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "title", "description",
          "$defs", "definitions"}  # fmt: skip
_TEXT_KEYS = {"type", "minLength", "maxLength", "pattern", "title", "description", "default",
            "examples"}  # fmt: skip
_ANY = "(?s:.*)"


class XmlRules:
    """Writes the grammar rules of one tool's arguments."""

    def __init__(
        self, form: XmlForm, function: Mapping[str, Any], layout: Mapping[str, Any],
        text: Callable[[str], str], prefix: str,
    ) -> None:  # fmt: skip
        """`layout`: JSON layout; `text`: quotes text for Lark; `prefix`: of the rules' names."""
        self._form, self._text, self._prefix = form, text, prefix
        self._root: Mapping[str, Any] = function["parameters"]
        self._strict, self._layout = bool(function.get("strict")), layout
        self._lines: list[str] = []

    def rules(self) -> list[str]:
        """Return the rule `prefix` and the rules it needs. Raises InputError."""
        root = self._root
        self._check(root, _OBJECT_KEYS)
        properties, required = root.get("properties", {}), root.get("required", [])
        parts = []
        for key, schema in properties.items():
            if self._form.named.strip() in key:
                raise InputError(f"{key!r:.60} cannot be written in this model's tool calls")
            element = self._element(self._text(self._form.opens + key + self._form.named), schema)
            parts.append(element if key in required else f"{element}?")
        if missing := [key for key in required if key not in properties]:
            raise InputError(f"required: {missing[0]!r:.60} is not among the properties")
        if additional := root.get("additionalProperties"):
            excluded = " | ".join(literal(key) for key in properties)
            name = self._rule(f"/[A-Za-z_][A-Za-z0-9_.-]*/ & ~({excluded})" if excluded else
                              "/[A-Za-z_][A-Za-z0-9_.-]*/", terminal=True)  # fmt: skip
            begin = f"{self._text(self._form.opens)} {name} {self._text(self._form.named)}"
            parts.append(self._element(begin, {} if additional is True else additional) + "*")
        return [f"{self._prefix}: " + (" ".join(parts) or '""'), *self._lines]

    def _check(self, schema: Mapping[str, Any], known: Iterable[str]) -> None:
        if self._strict and (unknown := sorted(set(schema) - set(known))):
            raise InputError(f"{unknown[0]!r:.60} is not supported in this model's tool calls")

    def _rule(self, body: str, *, terminal: bool = False) -> str:
        name = f"{self._prefix}_{len(self._lines)}"
        name = name.upper() if terminal else name
        self._lines.append(f"{name}: {body}")
        return name

    def _element(self, begin: str, schema: Any) -> str:
        """Return the rule of an element: `begin`, a value and the closing marker."""
        values = [self._value(branch) for branch in branches(schema, self._root)]
        if not values:
            raise InputError("a schema allows no value")
        return self._rule(f"{begin} ({' | '.join(dict.fromkeys(values))})")

    def _value(self, schema: Mapping[str, Any]) -> str:
        closes = self._form.closes
        if "enum" in schema:
            words = [spelled(value) for value in schema["enum"]]
            if any(closes in word + closes[:-1] for word in words):
                raise InputError(
                    "enum: a text contains the marker that ends texts in this model's calls"
                )
            return " | ".join(literal(word + closes) for word in words)
        kind = schema["type"]
        if kind in SPELLED:
            return " | ".join(literal(word + closes) for word in SPELLED[kind])
        if kind == "string":
            return self._rule(self._string_terminal(schema), terminal=True)
        definitions = {
            key: self._root[key] for key in ("$defs", "definitions") if key in self._root
        }
        complete = {**definitions, **resolved(schema, self._root), "x-guidance": self._layout}
        return f"%json {json.dumps(complete)} {literal(closes)}"

    def _string_terminal(self, schema: Mapping[str, Any]) -> str:
        """Return a terminal: text that matches the schema, up to the first closing marker."""
        self._check(schema, _TEXT_KEYS)
        patterns = [f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"]
        if isinstance(pattern := schema.get("pattern"), str):
            anchored_start, anchored_end = pattern.startswith("^"), pattern.endswith("$")
            body = pattern[anchored_start : len(pattern) - anchored_end]
            patterns.append(
                ("" if anchored_start else _ANY) + f"({body})" + ("" if anchored_end else _ANY)
            )
        end = literal(self._form.closes)
        texts = " & ".join("/" + re.sub(r"(?<!\\)/", r"\\/", part) + "/" for part in patterns)
        return f"(({texts}) {end}) & ~(/{_ANY}/ {end} /(?s:.+)/)"
