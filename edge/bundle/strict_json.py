"""JSON from strangers: bounded depth, no duplicate keys, no NaN, no recursion before the check."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 64
# a string without an end runs to the end of the text, so that no start is scanned twice
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def _depth(text: str) -> int:
    """Deepest nesting of brackets outside strings, without recursion."""
    depth = deepest = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        if token[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token[0] in "]}":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {key!r} appears twice")
        out[key] = value
    return out


def loads(data: bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse UTF-8 JSON. Raises ValueError on anything malformed, deeper than `max_depth`, with
    duplicate keys, or with the `Infinity` and `NaN` that Python alone calls JSON.
    """
    text = data.decode("utf-8", errors="strict")
    depth = _depth(text)
    if depth > max_depth:
        raise ValueError(f"nested {depth} deep, {max_depth} allowed")

    def constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    def number(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise ValueError(f"{digits:.40} is too large a number")
        return value

    return json.loads(text, object_pairs_hook=_unique, parse_constant=constant, parse_float=number)
