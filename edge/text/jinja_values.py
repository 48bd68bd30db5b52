"""The values of templates: their methods and functions, with their costs.

Values are text, numbers, booleans, None, undefined, and lists and dictionaries of values. No value
is larger than MAX_SIZE, in characters and elements, and its size is bounded before it is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import Undefined

MAX_SIZE = 4 << 20  # of any one value, and characters of the whole output
ELEMENT = 16  # size of any value besides its characters
MAX_WORK = 2_000_000  # of one rendering: nodes, elements, and characters / 64
MAX_MADE = 16 * MAX_SIZE  # total size of the values that one rendering builds
MAX_BITS = 1024  # of a number: the time to print it is quadratic in them
MAX_NESTED = 64
MAX_RANGE = 100_000
MAX_PATH = 256  # characters of a dotted path, which is split for each value


class TemplateRaised(TemplateError):
    """The template called `raise_exception`."""


class Budget:
    """The work and memory that one rendering has left, counted the same on every machine."""

    def __init__(self) -> None:
        self._work_left, self._size_left = MAX_WORK, MAX_MADE

    def spend(self, work: int = 1) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise SecurityError(f"takes more than {MAX_WORK} steps")

    def read(self, *values: Any) -> int:
        """Charge for reading values. Return their size."""
        size, elements = measure(*values)
        self.spend(elements + (size >> 6))
        return size

    def make(self, size: int) -> None:
        """Charge for a value before it is built."""
        if size > MAX_SIZE:
            raise too_large()
        self._size_left -= size
        if self._size_left < 0:
            raise SecurityError(f"makes values of more than {MAX_MADE} characters")
        self.spend(size >> 6)

    def made(self, value: Any) -> Any:
        """Charge for a value after it is built, if its size was known to be bounded."""
        size, elements = measure(value)
        self.make(size)
        self.spend(elements)
        return value


def too_large() -> SecurityError:
    return SecurityError(f"builds a value of more than {MAX_SIZE} characters")


def measure(*values: Any) -> tuple[int, int]:
    """Return the size of values, in characters plus ELEMENT per value, and the number of values.

    Shared values count each time they are reached. Raises SecurityError beyond the limits of size
    and depth.
    """
    size = count = 0
    pending: list[tuple[Iterable[Any], int]] = [(values, 0)]
    while pending:
        together, depth = pending.pop()
        for value in together:
            size += ELEMENT
            count += 1
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, int):
                if value.bit_length() > MAX_BITS:
                    raise SecurityError(f"computes a number of more than {MAX_BITS} bits")
            # most are one of the first three: it takes long to find out that one is a Mapping
            elif isinstance(value, (list, tuple, dict, Mapping)):
                if depth > MAX_NESTED:
                    raise SecurityError(f"nests values more than {MAX_NESTED} deep")
                if len(value) * ELEMENT > MAX_SIZE:
                    raise too_large()
                pending.append((value, depth + 1))
                if not isinstance(value, (list, tuple)):
                    pending.append((value.values(), depth + 1))
            if size > MAX_SIZE:
                raise too_large()
    return size, count


def text_of(value: Any) -> str:
    """Return the text of a plain value. Raises SecurityError for containers (see `spelled`)."""
    if isinstance(value, (str, int, float, Undefined)) or value is None:
        return str(value)
    raise SecurityError(f"prints a {type(value).__name__}; use tojson")


def spelled(budget: Budget, value: Any) -> str:
    """Return the text of a value; lists and dictionaries as Python prints them."""
    if not isinstance(value, (dict, list, tuple)):
        return text_of(value)
    budget.read(value)
    budget.make(_max_printed_length(value))
    return str(value)


def _max_printed_length(value: Any) -> int:
    """Return an upper bound for the length of a value as Python prints it."""
    if isinstance(value, str):
        return 2 + 10 * len(value)  # at most \\U0010ffff for each
    if isinstance(value, int):
        return 6 + value.bit_length() // 3
    if isinstance(value, dict):
        return 2 + sum(
            4 + _max_printed_length(key) + _max_printed_length(item) for key, item in value.items()
        )
    if isinstance(value, (list, tuple)):
        return 3 + sum(2 + _max_printed_length(item) for item in value)
    return max(32, len(text_of(value)))


def items_of(value: Any, budget: Budget) -> list[Any]:
    """Return the elements that a loop over a value visits."""
    if isinstance(value, Undefined):
        return list(value)
    if not isinstance(value, (str, list, tuple, range, Mapping)):
        raise TypeError(f"{type(value).__name__!r} object is not iterable")
    budget.spend(len(value))
    return list(value)


def key_of(value: Any) -> Any:
    """Return a dictionary's key. Raises SecurityError if a template can choose its hash."""
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, int) and abs(value) < 1 << 53:
        return value
    raise SecurityError(f"uses a {type(value).__name__} as a key")


def attribute_getter(budget: Budget, path: Any, default: Any = None) -> Callable[[Any], Any]:
    """Return a function from nested mappings and lists to the element at a dotted path.

    Each part is charged, here and when it is followed. The first that is missing ends the path,
    because a chain of undefined values would keep all of them.
    """
    if isinstance(path, str) and len(path) > MAX_PATH:
        raise SecurityError(f"follows a path of more than {MAX_PATH} characters")
    parts = path.split(".") if isinstance(path, str) else [key_of(path)]
    budget.spend(len(parts))
    keys = [(part, _index(part)) for part in parts]

    def attribute_of(value: Any) -> Any:
        for part, index in keys:
            budget.spend()
            if isinstance(value, (dict, Mapping)) and part in value:
                value = value[part]
            elif isinstance(value, (list, tuple)) and index is not None and index < len(value):
                value = value[index]
            else:
                return Undefined(obj=value, name=str(part)) if default is None else default
        return default if isinstance(value, Undefined) and default is not None else value

    return attribute_of


def _index(part: Any) -> int | None:
    if isinstance(part, str):
        return int(part) if part.isdigit() else None
    return part if isinstance(part, int) else None


# -- methods ---------------------------------------------------------------------------------------


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN = names(
    "capitalize endswith isalpha isdigit islower isspace isupper lower removeprefix removesuffix "
    "startswith title upper"
)
_SEARCHING = names("count find index partition")
# those that search from the end compare every place in full
_BACKWARDS = names("rfind rindex rpartition")
_STRIPPING = names("lstrip rstrip strip")


def method(budget: Budget, owner: Any, name: str) -> Callable[..., Any] | None:
    """Return a method of a value, or None if templates may not call it."""
    if isinstance(owner, str):
        text_method = _TEXT.get(name)
        if text_method is not None:
            return lambda *args, **kwargs: text_method(budget, owner, *args, **kwargs)
        if name in _PLAIN | _SEARCHING | _BACKWARDS:

            def call_text_method(*args: Any) -> Any:
                budget.read(owner, *args)
                if name in _BACKWARDS and args and isinstance(args[0], str):
                    budget.spend(len(owner) * len(args[0]) >> 6)
                budget.make(ELEMENT + 3 * len(owner))
                budget.spend(len(owner) >> 3)
                arguments = [tuple(arg) if isinstance(arg, list) else arg for arg in args]
                return getattr(owner, name)(*arguments)

            return call_text_method
        return None
    if isinstance(owner, Mapping) and name in ("get", "items", "keys", "values"):

        def call_mapping_method(*args: Any) -> Any:
            if name == "get":
                return owner.get(key_of(args[0]), *args[1:])
            budget.make(ELEMENT * (1 + len(owner)) * 3)
            if name == "items":
                return [list(pair) for pair in owner.items()]
            return list(owner) if name == "keys" else list(owner.values())

        return call_mapping_method
    if isinstance(owner, (list, tuple)) and name in ("count", "index"):

        def call_list_method(*args: Any) -> Any:
            budget.read(owner, *args)
            return getattr(owner, name)(*args)

        return call_list_method
    return None


def strip(which: str) -> Callable[..., str]:
    def stripped(budget: Budget, text: str, chars: str | None = None) -> str:
        if chars:
            budget.read(chars)
            chars = "".join(set(chars))
            budget.spend(len(text) * len(chars) >> 6)
        budget.make(len(text))
        return str(getattr(text, which)(chars))

    return stripped


def _split(method_name: str) -> Callable[..., list[str]]:
    def split(budget: Budget, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        budget.read(text, sep)
        if sep is None:
            budget.spend(len(text) >> 3)
            count = sum(1 for _ in re.finditer(r"\s+", text))
        else:
            if method_name == "rsplit":
                budget.spend(len(text) * len(sep) >> 6)
            count = text.count(sep)
        parts = 1 + (count if maxsplit < 0 else min(count, maxsplit))
        budget.make(len(text) + ELEMENT * parts)
        pieces: list[str] = getattr(text, method_name)(sep, maxsplit)
        return pieces

    return split


def _splitlines(budget: Budget, text: str, keepends: bool = False) -> list[str]:
    budget.read(text)
    budget.spend(len(text) >> 3)
    count = sum(1 for _ in re.finditer("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", text))
    budget.make(len(text) + ELEMENT * (1 + count))
    return text.splitlines(keepends)


def replace(budget: Budget, text: Any, old: Any, new: Any, count: Any = -1) -> str:
    text, old, new = text_of(text), text_of(old), text_of(new)
    budget.read(text, old, new)
    times = text.count(old)
    if isinstance(count, int) and 0 <= count < times:
        times = count
    budget.make(len(text) + times * len(new))
    return str(text.replace(old, new, -1 if count is None else count))


def join(budget: Budget, values: Any, between: Any = "", attribute: Any = None) -> str:
    items = items_of(values, budget)
    if attribute is not None:
        items = list(map(attribute_getter(budget, attribute), items))
    between = text_of(between)
    budget.make(budget.read(*items) + len(items) * len(between))
    return str(between.join(text_of(item) for item in items))


_TEXT: dict[str, Callable[..., Any]] = {
    **{name: strip(name) for name in _STRIPPING},
    **{name: _split(name) for name in ("split", "rsplit")},
    "splitlines": _splitlines,
    "replace": replace,
    "join": lambda budget, text, values: join(budget, values, text),
}


# -- functions -------------------------------------------------------------------------------------


def raised(message: Any = "") -> str:
    """The function `raise_exception`."""
    raise TemplateRaised(text_of(message)[:1000])


def now(form: Any) -> str:
    """The function `strftime_now`."""
    if not isinstance(form, str) or len(form) > 64 or re.search(r"%[^a-zA-Z%]*[0-9]", form):
        raise SecurityError("formats the time with more than 64 characters, or with a width")
    return datetime.now().strftime(form)


def counted(*bounds: Any) -> list[int]:
    """The function `range`."""
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise SecurityError(f"counts over more than {MAX_RANGE} numbers")
    return list(numbers)


def paired(values: Iterable[Any] = (), /, **names: Any) -> dict[Any, Any]:
    """The function `dict`."""
    pairs = values.items() if isinstance(values, Mapping) else values
    return {key_of(key): value for key, value in pairs} | names
