"""Constraints on an answer: a JSON schema, a regular expression, a Lark grammar or a list of texts.

They are compiled by `mask`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edge.errors import InputError

Kind = Literal["json_schema", "regex", "grammar", "choices"]
KINDS: tuple[Kind, ...] = ("json_schema", "regex", "grammar", "choices")
MAX_SOURCE = 1 << 20  # characters
MAX_CHOICES = 10_000
_OPENAI_KEYS = {"name", "schema", "strict", "description"}  # keys of `response_format.json_schema`


@dataclass(frozen=True)
class Constraint:
    """A constraint on an answer.

    Attributes:
        kind: the parameter that gives it.
        source: JSON of the schema or of the list of texts, or the expression or grammar itself.
    """

    kind: Kind
    source: str


def constraint_of(given: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint among the parameters `KINDS`, or None.

    Raises InputError naming the parameter, if there is more than one or its value is invalid.
    """
    kinds = [kind for kind in KINDS if given.get(kind) is not None]
    if len(kinds) > 1:
        raise InputError(
            f"cannot be given together with {kinds[1]}", field=kinds[0], remedy="choose one"
        )
    if not kinds:
        return None
    kind, value = kinds[0], given[kinds[0]]
    if kind == "json_schema":
        source = _schema_json(value)
    elif kind == "choices":
        source = json.dumps(_check_choices(value), ensure_ascii=False)
    else:
        source = _check_text(kind, value)
    if len(source) > MAX_SOURCE:
        raise InputError(f"has {len(source)} characters, at most {MAX_SOURCE} allowed", field=kind)
    return Constraint(kind, source)


def _schema_json(value: Any) -> str:
    """Return JSON of a schema given as object, `True` for any JSON, JSON or pydantic model."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as problem:
            raise InputError(
                f"is not JSON: {problem}", field="json_schema",
                remedy="give a dict, its JSON, a pydantic model, or the content of a file",
            ) from None  # fmt: skip
    if not isinstance(value, Mapping | bool):
        kind = type(value).__name__
        raise InputError(f"must be a JSON schema, not {kind}", field="json_schema")
    if isinstance(value, Mapping) and {"name", "schema"} <= set(value) <= _OPENAI_KEYS:
        # as a schema, the wrapper would constrain nothing
        raise InputError(
            "is OpenAI's wrapper around a schema",
            field="json_schema",
            remedy="give the schema in it",
        )
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise InputError(f"cannot be written as JSON: {problem}", field="json_schema") from None


def _check_choices(value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InputError("must be a list of texts", field="choices")
    choices = list(value)
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InputError(f"{len(choices)} texts, 1 to {MAX_CHOICES} allowed", field="choices")
    for index, choice in enumerate(choices):
        _check_text(f"choices.{index}", choice)
    return list(dict.fromkeys(choices))


def _check_text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InputError("must be a text, and not empty", field=field)
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        raise InputError(
            f"is not valid Unicode at character {problem.start}", field=field
        ) from None
    return value
