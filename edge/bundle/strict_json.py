"""Untrusted JSON: bounded depth, no duplicate keys, no NaN, no recursion before the depth check.

Needed because pydantic's parser lets the last of duplicate keys win.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from edge.bundle.files import REMEDY
from edge.errors import BundleError, Faults

Document = TypeVar("Document", bound=BaseModel)
MAX_DEPTH = 64
# an unterminated string matches up to the end of the text, so that no start is scanned twice
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _depth(data: bytes) -> int:
    """Return the deepest nesting of brackets outside strings, without recursion."""
    depth = deepest = 0
    for bracket in _STRING.sub(b"", data).translate(None, _NOT_BRACKETS):
        if bracket in b"[{":
            depth += 1
            if depth > deepest:
                deepest = depth
        else:
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
    """Parse UTF-8 JSON.

    Raises ValueError when it is malformed, nests deeper than `max_depth`, or has duplicate keys,
    `Infinity` or `NaN`.
    """
    text = data.decode("utf-8", errors="strict")
    depth = _depth(data)
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


def read_document(
    raw: bytes, file: Path, kind: type[Document], known: int, absent: int | None
) -> Document:
    """Parse a versioned JSON document into a pydantic model of strict types.

    Neither "8" nor true is an integer. `known` is the schema version that is read, `absent` the
    version of a document that does not state it. Raises BundleError naming the file, the first
    field at fault, and all faults.
    """
    try:
        data = loads(raw)
    except ValueError as problem:
        raise BundleError(f"is not valid JSON: {problem}", file=file, remedy=REMEDY) from None
    version = data.get("schema_version", absent) if isinstance(data, dict) else None
    if type(version) is not int or version != known:  # true equals 1, and so does 1.0
        raise BundleError(
            f"is {version!r}, this runtime reads version {known}",
            file=file,
            field="schema_version",
            remedy="export the model again with this version, or update mamba-edge",
        )
    try:
        return kind.model_validate_json(raw, strict=True)
    except ValidationError as problem:
        faults = Faults()
        for error in problem.errors(include_url=False):
            field = ".".join(map(str, error["loc"])) or file.stem
            faults.add(field, error["msg"].removeprefix("Value error, "))
    faults.refuse(BundleError, file=file, remedy=REMEDY)
    raise AssertionError("a refusal without faults")
