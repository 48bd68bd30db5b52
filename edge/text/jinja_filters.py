"""Filters and tests of templates, with their costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from jinja2 import filters, tests
from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

from edge.text.jinja_values import (
    ELEMENT,
    MAX_SIZE,
    Budget,
    attribute_getter,
    items_of,
    join,
    key_of,
    measure,
    names,
    replace,
    spelled,
    strip,
    text_of,
    too_large,
)


def _cased(name: str) -> Callable[[Budget, Any], str]:
    def changed(budget: Budget, value: Any) -> str:
        text = text_of(value)
        budget.make(3 * len(text))
        budget.spend(len(text) >> 3)
        return str(getattr(filters, f"do_{name}")(text))

    return changed


def _trim(budget: Budget, value: Any, chars: Any = None) -> str:
    return strip("strip")(budget, text_of(value), None if chars is None else text_of(chars))


def _indent(
    budget: Budget, value: Any, width: Any = 4, first: bool = False, blank: bool = False
) -> str:
    text = text_of(value)
    pad = width if isinstance(width, str) else " " * min(int(width), 1000)
    budget.make(len(text) + (text.count("\n") + 1) * (len(pad) + ELEMENT))
    first_line, *others = text.split("\n")
    others = [pad + line if line or blank else line for line in others]
    return "\n".join([pad + first_line if first else first_line, *others])


def _default(budget: Budget, value: Any, other: Any = "", boolean: bool = False) -> Any:
    return other if isinstance(value, Undefined) or (boolean and not value) else value


def _length(budget: Budget, value: Any) -> int:
    return len(value)


def _first(budget: Budget, values: Any) -> Any:
    return next(iter(items_of(values, budget)), Undefined("no first item, the sequence is empty"))


def _last(budget: Budget, values: Any) -> Any:
    items = items_of(values, budget)
    return items[-1] if items else Undefined("no last item, the sequence is empty")


def _list(budget: Budget, values: Any) -> list[Any]:
    items = items_of(values, budget)
    budget.make(ELEMENT * (1 + len(items)))
    return items


def _reverse(budget: Budget, values: Any) -> Any:
    if isinstance(values, str):
        budget.make(len(values))
        return values[::-1]
    return _list(budget, values)[::-1]


def _pairs(budget: Budget, value: Any) -> list[Any]:
    if isinstance(value, Undefined):
        return []
    if not isinstance(value, Mapping):
        raise TypeError("can only get item pairs from a mapping")
    budget.make(3 * ELEMENT * (1 + len(value)))
    return [list(pair) for pair in value.items()]


def _key_function(budget: Budget, attribute: Any, case_sensitive: bool) -> Callable[[Any], Any]:
    attribute_of = None if attribute is None else attribute_getter(budget, attribute)

    def key(item: Any) -> Any:
        value = item if attribute_of is None else attribute_of(item)
        return value.lower() if isinstance(value, str) and not case_sensitive else value

    return key


def _sorted(
    budget: Budget, values: Any, reverse: bool = False, case_sensitive: bool = False,
    attribute: Any = None,
) -> list[Any]:  # fmt: skip
    items = _list(budget, values)
    work = budget.read(items)
    budget.spend((work >> 4) * len(items).bit_length() >> 2)
    return sorted(
        items, key=_key_function(budget, attribute, case_sensitive), reverse=bool(reverse)
    )


def _dict_sorted(
    budget: Budget, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False
) -> list[Any]:
    return _sorted(budget, _pairs(budget, value), reverse, case_sensitive, int(by == "value"))


def _unique(
    budget: Budget, values: Any, case_sensitive: bool = False, attribute: Any = None
) -> list[Any]:
    items = _list(budget, values)
    budget.read(items)
    key = _key_function(budget, attribute, case_sensitive)
    unique: dict[Any, Any] = {}
    for item in items:
        unique.setdefault(key_of(key(item)), item)
    return list(unique.values())


def _extreme(choose: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(
        budget: Budget, values: Any, case_sensitive: bool = False, attribute: Any = None
    ) -> Any:
        items = _list(budget, values)
        budget.read(items)
        if not items:
            return Undefined("no aggregated item, the sequence is empty")
        return choose(items, key=_key_function(budget, attribute, case_sensitive))

    return extreme


def _map(budget: Budget, values: Any, name: Any = None, *args: Any, **kwargs: Any) -> list[Any]:
    """Apply `map(attribute=…)`, or `map` with the name of a filter."""
    items = items_of(values, budget)
    if name is None and set(kwargs) <= {"attribute", "default"} and "attribute" in kwargs:
        path, default = kwargs["attribute"], kwargs.get("default")
        mapped = list(map(attribute_getter(budget, path, default), items))
    elif name in FILTERS and name != "map":
        budget.spend(len(items))
        mapped = [FILTERS[name](budget, item, *args, **kwargs) for item in items]
    else:
        raise SecurityError(f"maps {name or sorted(kwargs)}, which is not supported")
    budget.read(mapped)
    return mapped


def _selecting(expected: bool, by_attribute: bool) -> Callable[..., list[Any]]:
    def selected(budget: Budget, values: Any, *args: Any) -> list[Any]:
        items, rest = items_of(values, budget), list(args)
        attribute_of = attribute_getter(budget, rest.pop(0)) if by_attribute else None
        name = rest.pop(0) if rest else None
        if name is not None and name not in TESTS:
            raise SecurityError(f"selects by {name!r:.40}, which is not supported")

        def holds(item: Any) -> bool:
            value = item if attribute_of is None else attribute_of(item)
            if name is None:
                return bool(value)
            if name in COMPARING:
                budget.read(value, *rest)
            return bool(TESTS[name](value, *rest))

        return [item for item in items if holds(item) is expected]

    return selected


def _number(kind: Callable[..., Any], name: str) -> Callable[..., Any]:
    convert = getattr(filters, f"do_{name}")

    def converted(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget.read(value, *args)
        if isinstance(value, str) and len(value) > 1000:
            return args[0] if args else kind()
        if not isinstance(value, (str, int, float, Undefined)) and value is not None:
            raise TypeError(f"{name} of a {type(value).__name__}")
        return convert(value, *args, **kwargs)

    return converted


def _absolute(budget: Budget, value: Any) -> Any:
    return abs(value)


def _same(budget: Budget, value: Any) -> Any:
    return value


def _as_text(budget: Budget, value: Any) -> str:
    return spelled(budget, value)


def _number_of(value: Any) -> Any:
    """Return a number, else raise TypeError: `%` would format a text, at any width it asks for."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"must be a number, not {type(value).__name__}")
    return value


def _round(budget: Budget, value: Any, precision: Any = 0, method: str = "common") -> Any:
    if not isinstance(precision, int) or not -30 <= precision <= 30:
        raise SecurityError(f"rounds to {precision!r:.40} places")
    budget.read(_number_of(value))
    return filters.do_round(value, precision, method)  # type: ignore[arg-type]


def _to_json(budget: Budget, value: Any, indent: int | None = None, **options: Any) -> str:
    """Return JSON as Hugging Face's templates expect it: not ASCII only, no escapes for HTML."""
    dump_options = {"ensure_ascii": False, "sort_keys": False} | {
        key: options[key] for key in ("ensure_ascii", "separators", "sort_keys") if key in options
    }
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise SecurityError("indents JSON by more than 16")
    size, elements = measure(value)
    budget.spend(elements + (size >> 4))
    budget.read(dump_options.get("separators"))
    separator_size = sum(len(str(separator)) for separator in dump_options.get("separators") or ())
    if elements * separator_size > MAX_SIZE:
        raise too_large()
    longest = size * (6 if dump_options["ensure_ascii"] else 2) + elements * separator_size
    if indent and longest + elements * indent * _depth(value) > MAX_SIZE:
        raise too_large()
    if isinstance(value, Undefined):
        raise SecurityError("writes an undefined value as JSON")
    try:
        text = json.dumps(value, indent=indent, allow_nan=False, **dump_options)
    except (TypeError, ValueError) as problem:
        raise SecurityError(f"cannot write a value as JSON: {problem}") from None
    budget.make(len(text))
    return text


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [
            child
            for container in level
            if isinstance(container, (Mapping, list, tuple))
            for child in (container.values() if isinstance(container, Mapping) else container)
        ]
    return deepest


COMPARING = frozenset(("eq", "equalto", "in", "ne"))
FILTERS: dict[str, Callable[..., Any]] = {
    "abs": _absolute,
    "capitalize": _cased("capitalize"),
    "count": _length,
    "d": _default,
    "default": _default,
    "dictsort": _dict_sorted,
    "first": _first,
    "float": _number(float, "float"),
    "indent": _indent,
    "int": _number(int, "int"),
    "items": _pairs,
    "join": join,
    "last": _last,
    "length": _length,
    "list": _list,
    "lower": _cased("lower"),
    "map": _map,
    "max": _extreme(max),
    "min": _extreme(min),
    "reject": _selecting(False, False),
    "rejectattr": _selecting(False, True),
    "replace": replace,
    "reverse": _reverse,
    "round": _round,
    "safe": _same,
    "select": _selecting(True, False),
    "selectattr": _selecting(True, True),
    "sort": _sorted,
    "string": _as_text,
    "title": _cased("title"),
    "tojson": _to_json,
    "trim": _trim,
    "unique": _unique,
    "upper": _cased("upper"),
}
_TESTS = names(
    "boolean defined eq equalto false float in integer iterable mapping ne none "
    "number sequence string true undefined"
)
TESTS: dict[str, Callable[..., Any]] = {
    name: cast(Callable[..., Any], tests.TESTS[name]) for name in _TESTS
} | {
    "divisibleby": lambda value, number: _number_of(value) % _number_of(number) == 0,
    "even": lambda value: _number_of(value) % 2 == 0,
    "odd": lambda value: _number_of(value) % 2 == 1,
}
