"""What templates do with values: methods, filters and tests, each of which says what it costs.

Values are text, numbers, booleans, None, undefined ones, and lists and dictionaries of them. One
never has more than MAX_SIZE characters and elements, and nothing is made before it is known how
large it will be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, cast

from jinja2 import filters, tests
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import Undefined

MAX_SIZE = 4 << 20  # of any one value, and characters of the whole output
ELEMENT = 16  # what one value adds to a size, whatever it is
MAX_WORK = 2_000_000  # of one rendering: nodes, elements, and characters / 64
MAX_MADE = 16 * MAX_SIZE  # of all values that one rendering makes
MAX_BITS = 4096  # of a number
MAX_NESTED = 64
MAX_RANGE = 100_000


class TemplateRaised(TemplateError):
    """The template called `raise_exception`."""


class Budget:
    """What is left of the work and memory of one rendering; the same on every machine."""

    def __init__(self) -> None:
        self._work, self._made = MAX_WORK, MAX_MADE

    def spend(self, work: int = 1) -> None:
        self._work -= work
        if self._work < 0:
            raise SecurityError(f"takes more than {MAX_WORK} steps")

    def read(self, *values: Any) -> int:
        """Charge for looking at values; their size."""
        size, elements = measure(*values)
        self.spend(elements + (size >> 6))
        return size

    def make(self, size: int) -> None:
        """Charge for a value before it is made."""
        if size > MAX_SIZE:
            raise too_large()
        self._made -= size
        if self._made < 0:
            raise SecurityError(f"makes values of more than {MAX_MADE} characters")
        self.spend(size >> 6)

    def made(self, value: Any) -> Any:
        """Charge for a value that was made, of a size that was known to be bounded."""
        size, elements = measure(value)
        self.make(size)
        self.spend(elements)
        return value


def too_large() -> SecurityError:
    return SecurityError(f"builds a value of more than {MAX_SIZE} characters")


def measure(*values: Any) -> tuple[int, int]:
    """Characters in values with ELEMENT for each value, shared ones each time they are reached,
    and how many values that are.

    Raises SecurityError beyond the limits of size and depth.
    """
    size = count = 0
    waiting = [(value, 0) for value in values]
    while waiting:
        value, depth = waiting.pop()
        size += ELEMENT
        count += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise SecurityError(f"computes a number of more than {MAX_BITS} bits")
        elif isinstance(value, (Mapping, list, tuple)):
            if depth > MAX_NESTED:
                raise SecurityError(f"nests values more than {MAX_NESTED} deep")
            if len(value) * ELEMENT > MAX_SIZE:
                raise too_large()
            waiting += [(one, depth + 1) for one in value]
            if isinstance(value, Mapping):
                waiting += [(one, depth + 1) for one in value.values()]
        if size > MAX_SIZE:
            raise too_large()
    return size, count


def text_of(value: Any) -> str:
    """Text of a plain value. Containers are refused: their length is not bounded by their size."""
    if isinstance(value, (str, int, float, Undefined)) or value is None:
        return str(value)
    raise SecurityError(f"prints a {type(value).__name__}; use tojson")


def items_of(value: Any, budget: Budget) -> list[Any]:
    """The elements that a loop over a value goes through."""
    if isinstance(value, Undefined):
        return list(value)
    if not isinstance(value, (str, list, tuple, range, Mapping)):
        raise TypeError(f"{type(value).__name__!r} object is not iterable")
    budget.spend(len(value))
    return list(value)


def key_of(value: Any) -> Any:
    """A dictionary's key: nothing whose hash a template can choose."""
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, int) and abs(value) < 1 << 53:
        return value
    raise SecurityError(f"uses a {type(value).__name__} as a key")


def attribute_of(value: Any, path: Any, default: Any = None) -> Any:
    """An element of mappings and lists by a dotted path, as filters take it."""
    for part in str(path).split(".") if isinstance(path, str) else [path]:
        index = int(part) if isinstance(part, str) and part.isdigit() else part
        if isinstance(value, Mapping):
            value = value.get(part, Undefined(obj=value, name=part))
        elif isinstance(value, (list, tuple)) and isinstance(index, int):
            value = value[index] if index < len(value) else Undefined(obj=value, name=part)
        else:
            value = Undefined(obj=value, name=str(part))
    return default if isinstance(value, Undefined) and default is not None else value


# -- methods ---------------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN = _names(
    "capitalize endswith isalpha isdigit islower isspace isupper lower removeprefix removesuffix "
    "startswith title upper"
)
_SEARCHING = _names("count find index partition")
# those that search from the end compare every place in full
_BACKWARDS = _names("rfind rindex rpartition")
_STRIPPING = _names("lstrip rstrip strip")


def method(budget: Budget, owner: Any, name: str) -> Callable[..., Any] | None:
    """A method of a value, None where templates may not call it."""
    if isinstance(owner, str):
        own = _TEXT.get(name)
        if own is not None:
            return lambda *args, **kwargs: own(budget, owner, *args, **kwargs)
        if name in _PLAIN | _SEARCHING | _BACKWARDS:

            def called(*args: Any) -> Any:
                budget.read(owner, *args)
                if name in _BACKWARDS and args and isinstance(args[0], str):
                    budget.spend(len(owner) * len(args[0]) >> 6)
                budget.make(ELEMENT + 3 * len(owner))
                budget.spend(len(owner) >> 3)
                given = [tuple(one) if isinstance(one, list) else one for one in args]
                return getattr(owner, name)(*given)

            return called
        return None
    if isinstance(owner, Mapping) and name in ("get", "items", "keys", "values"):

        def looked(*args: Any) -> Any:
            if name == "get":
                return owner.get(key_of(args[0]), *args[1:])
            budget.make(ELEMENT * (1 + len(owner)) * 3)
            if name == "items":
                return [list(pair) for pair in owner.items()]
            return list(owner) if name == "keys" else list(owner.values())

        return looked
    if isinstance(owner, (list, tuple)) and name in ("count", "index"):

        def counted(*args: Any) -> Any:
            budget.read(owner, *args)
            return getattr(owner, name)(*args)

        return counted
    return None


def _strip(which: str) -> Callable[..., str]:
    def strip(budget: Budget, text: str, chars: str | None = None) -> str:
        if chars:
            budget.read(chars)
            chars = "".join(set(chars))
            budget.spend(len(text) * len(chars) >> 6)
        budget.make(len(text))
        return str(getattr(text, which)(chars))

    return strip


def _split(which: str) -> Callable[..., list[str]]:
    def split(budget: Budget, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        budget.read(text, sep)
        if sep is None:
            budget.spend(len(text) >> 3)
            count = sum(1 for _ in re.finditer(r"\s+", text))
        else:
            if which == "rsplit":
                budget.spend(len(text) * len(sep) >> 6)
            count = text.count(sep)
        parts = 1 + (count if maxsplit < 0 else min(count, maxsplit))
        budget.make(len(text) + ELEMENT * parts)
        found: list[str] = getattr(text, which)(sep, maxsplit)
        return found

    return split


def _splitlines(budget: Budget, text: str, keepends: bool = False) -> list[str]:
    budget.read(text)
    budget.spend(len(text) >> 3)
    count = sum(1 for _ in re.finditer("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", text))
    budget.make(len(text) + ELEMENT * (1 + count))
    return text.splitlines(keepends)


def _replace(budget: Budget, text: Any, old: Any, new: Any, count: Any = -1) -> str:
    text, old, new = text_of(text), text_of(old), text_of(new)
    budget.read(text, old, new)
    times = text.count(old)
    if isinstance(count, int) and 0 <= count < times:
        times = count
    budget.make(len(text) + times * len(new))
    return str(text.replace(old, new, -1 if count is None else count))


def _join(budget: Budget, values: Any, between: Any = "", attribute: Any = None) -> str:
    items = items_of(values, budget)
    if attribute is not None:
        items = [attribute_of(item, attribute) for item in items]
    between = text_of(between)
    budget.make(budget.read(*items) + len(items) * len(between))
    return str(between.join(text_of(item) for item in items))


_TEXT: dict[str, Callable[..., Any]] = {
    **{name: _strip(name) for name in _STRIPPING},
    **{name: _split(name) for name in ("split", "rsplit")},
    "splitlines": _splitlines,
    "replace": _replace,
    "join": lambda budget, text, values: _join(budget, values, text),
}


# -- filters ---------------------------------------------------------------------------------------


def _cased(name: str) -> Callable[[Budget, Any], str]:
    def changed(budget: Budget, value: Any) -> str:
        text = text_of(value)
        budget.make(3 * len(text))
        budget.spend(len(text) >> 3)
        return str(getattr(filters, f"do_{name}")(text))

    return changed


def _trim(budget: Budget, value: Any, chars: Any = None) -> str:
    return _strip("strip")(budget, text_of(value), None if chars is None else text_of(chars))


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


def _keyed(attribute: Any, case_sensitive: bool) -> Callable[[Any], Any]:
    def key(item: Any) -> Any:
        value = item if attribute is None else attribute_of(item, attribute)
        return value.lower() if isinstance(value, str) and not case_sensitive else value

    return key


def _sorted(
    budget: Budget, values: Any, reverse: bool = False, case_sensitive: bool = False,
    attribute: Any = None,
) -> list[Any]:  # fmt: skip
    items = _list(budget, values)
    work = budget.read(items)
    budget.spend((work >> 4) * len(items).bit_length() >> 2)
    return sorted(items, key=_keyed(attribute, case_sensitive), reverse=bool(reverse))


def _dict_sorted(
    budget: Budget, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False
) -> list[Any]:
    return _sorted(budget, _pairs(budget, value), reverse, case_sensitive, int(by == "value"))


def _unique(
    budget: Budget, values: Any, case_sensitive: bool = False, attribute: Any = None
) -> list[Any]:
    items = _list(budget, values)
    budget.read(items)
    key = _keyed(attribute, case_sensitive)
    found: dict[Any, Any] = {}
    for item in items:
        found.setdefault(key_of(key(item)), item)
    return list(found.values())


def _extreme(which: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(
        budget: Budget, values: Any, case_sensitive: bool = False, attribute: Any = None
    ) -> Any:
        items = _list(budget, values)
        budget.read(items)
        if not items:
            return Undefined("no aggregated item, the sequence is empty")
        return which(items, key=_keyed(attribute, case_sensitive))

    return extreme


def _map(budget: Budget, values: Any, name: Any = None, *args: Any, **kwargs: Any) -> list[Any]:
    """`map(attribute=…)`, or `map` with the name of a filter."""
    items = items_of(values, budget)
    if name is None and set(kwargs) <= {"attribute", "default"} and "attribute" in kwargs:
        found = [attribute_of(v, kwargs["attribute"], kwargs.get("default")) for v in items]
    elif name in FILTERS and name != "map":
        budget.spend(len(items))
        found = [FILTERS[name](budget, item, *args, **kwargs) for item in items]
    else:
        raise SecurityError(f"maps {name or sorted(kwargs)}, which is not supported")
    budget.read(found)
    return found


def _selecting(wanted: bool, by_attribute: bool) -> Callable[..., list[Any]]:
    def selected(budget: Budget, values: Any, *args: Any) -> list[Any]:
        items, rest = items_of(values, budget), list(args)
        path = rest.pop(0) if by_attribute else None
        name = rest.pop(0) if rest else None
        if name is not None and name not in TESTS:
            raise SecurityError(f"selects by {name!r:.40}, which is not supported")

        def holds(item: Any) -> bool:
            value = attribute_of(item, path) if by_attribute else item
            if name is None:
                return bool(value)
            if name in COMPARING:
                budget.read(value, *rest)
            return bool(TESTS[name](value, *rest))

        return [item for item in items if holds(item) is wanted]

    return selected


def _number(kind: Callable[..., Any], name: str) -> Callable[..., Any]:
    convert = getattr(filters, f"do_{name}")

    def made(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget.read(value, *args)
        if isinstance(value, str) and len(value) > 1000:
            return args[0] if args else kind()
        if not isinstance(value, (str, int, float, Undefined)) and value is not None:
            raise TypeError(f"{name} of a {type(value).__name__}")
        return convert(value, *args, **kwargs)

    return made


def _absolute(budget: Budget, value: Any) -> Any:
    return abs(value)


def _same(budget: Budget, value: Any) -> Any:
    return value


def _as_text(budget: Budget, value: Any) -> str:
    return text_of(value)


def _round(budget: Budget, value: Any, precision: Any = 0, method: str = "common") -> Any:
    if not isinstance(precision, int) or not -30 <= precision <= 30:
        raise SecurityError(f"rounds to {precision!r:.40} places")
    budget.read(value)
    return filters.do_round(value, precision, method)  # type: ignore[arg-type]


def _to_json(budget: Budget, value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as Hugging Face's templates expect it: not ASCII only, nothing escaped for HTML."""
    kept = {"ensure_ascii": False, "sort_keys": False} | {
        key: options[key] for key in ("ensure_ascii", "separators", "sort_keys") if key in options
    }
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise SecurityError("indents JSON by more than 16")
    size, elements = measure(value)
    budget.spend(elements + (size >> 4))
    budget.read(kept.get("separators"))
    between = sum(len(str(one)) for one in kept.get("separators") or ())
    longest = size * (6 if kept["ensure_ascii"] else 2) + elements * between
    if indent and longest + elements * indent * _depth(value) > MAX_SIZE:
        raise too_large()
    if isinstance(value, Undefined):
        raise SecurityError("writes an undefined value as JSON")
    try:
        text = json.dumps(value, indent=indent, allow_nan=False, **kept)
    except (TypeError, ValueError) as problem:
        raise SecurityError(f"cannot write a value as JSON: {problem}") from None
    budget.make(len(text))
    return text


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [
            below
            for one in level
            if isinstance(one, (Mapping, list, tuple))
            for below in (one.values() if isinstance(one, Mapping) else one)
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
    "join": _join,
    "last": _last,
    "length": _length,
    "list": _list,
    "lower": _cased("lower"),
    "map": _map,
    "max": _extreme(max),
    "min": _extreme(min),
    "reject": _selecting(False, False),
    "rejectattr": _selecting(False, True),
    "replace": _replace,
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
_TESTS = _names(
    "boolean defined divisibleby eq equalto even false float in integer iterable mapping ne none "
    "number odd sequence string true undefined"
)
TESTS: dict[str, Callable[..., Any]] = {
    name: cast(Callable[..., Any], tests.TESTS[name]) for name in _TESTS
}


# -- functions -------------------------------------------------------------------------------------


def raised(message: Any = "") -> str:
    """`raise_exception`."""
    raise TemplateRaised(text_of(message)[:1000])


def now(form: Any) -> str:
    """`strftime_now`."""
    if not isinstance(form, str) or len(form) > 64 or re.search(r"%[^a-zA-Z%]*[0-9]", form):
        raise SecurityError("formats the time with more than 64 characters, or with a width")
    return datetime.now().strftime(form)


def counted(*bounds: Any) -> list[int]:
    """`range`."""
    found = range(*bounds)
    if len(found) > MAX_RANGE:
        raise SecurityError(f"counts over more than {MAX_RANGE} numbers")
    return list(found)


def paired(values: Iterable[Any] = (), /, **names: Any) -> dict[Any, Any]:
    """`dict`."""
    pairs = values.items() if isinstance(values, Mapping) else values
    return {key_of(key): value for key, value in pairs} | names
