"""The objects of a rendering: its output, names and their scopes, functions and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

from edge.text.jinja_values import MAX_SIZE, Budget

MISSING = object()


class TextOutput:
    """Text that is written in parts, up to MAX_SIZE."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._parts: list[str] = []
        self._size = 0

    def write(self, part: str) -> None:
        self._size += len(part)
        if self._size > MAX_SIZE:
            raise SecurityError(f"writes more than {MAX_SIZE} characters")
        self._parts.append(part)

    def text(self) -> str:
        self._budget.make(self._size)
        return "".join(self._parts)


class NameScope:
    """Names with their values, and the scope around them."""

    def __init__(self, outer: NameScope | None, names: dict[str, Any] | None = None) -> None:
        self.outer, self.names = outer, {} if names is None else names

    def find(self, name: str) -> Any:
        scope: NameScope | None = self
        while scope is not None:
            value = scope.names.get(name, MISSING)
            if value is not MISSING:
                return value
            scope = scope.outer
        return MISSING


class TemplateNamespace:
    """`namespace()`: names that a loop can set for the statements after it."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names


class TemplateFunction:
    """A function that a template may call."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name, self.call = name, call


class LoopVariable:
    """The variable `loop`."""

    def __init__(self, items: list[Any], budget: Budget) -> None:
        self.items, self.at = items, -1
        self._budget = budget
        self._before: Any = MISSING

    def attribute(self, name: str) -> Any:
        at, length = self.at, len(self.items)
        attributes: dict[str, Any] = {
            "index": at + 1, "index0": at, "first": at == 0, "last": at == length - 1,
            "length": length, "revindex": length - at, "revindex0": length - at - 1,
            "depth": 1, "depth0": 0,
        }  # fmt: skip
        if name in attributes:
            return attributes[name]
        if name == "previtem":
            return self.items[at - 1] if at else Undefined("there is no previous item")
        if name == "nextitem":
            return self.items[at + 1] if at + 1 < length else Undefined("there is no next item")
        if name == "cycle":
            return TemplateFunction(name, lambda *given: given[at % len(given)])
        if name == "changed":
            return TemplateFunction(name, self._changed)
        return Undefined(obj=self, name=name)

    def _changed(self, *values: Any) -> bool:
        self._budget.read(*values)
        changed = self._before is MISSING or self._before != values
        self._before = values
        return changed
