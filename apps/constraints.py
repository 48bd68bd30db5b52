"""Options that hold an answer to a form: what they mean, read from text or from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from edge.errors import InputError
from edge.runtime.constrain.statement import MAX_SOURCE

_PANEL = "What an answer has to be"


def _form(name: str, metavar: str, says: str) -> Any:
    return typer.Option(name, metavar=metavar, help=says, rich_help_panel=_PANEL)


JsonSchema = Annotated[
    str | None, _form("--json-schema", "FILE", "JSON of this schema; {…} instead of a file too.")
]
Regex = Annotated[str | None, _form("--regex", "EXPRESSION", "Text that matches this.")]
GrammarFile = Annotated[str | None, _form("--grammar", "FILE", "Text of this Lark grammar.")]
Choices = Annotated[
    list[str] | None,
    _form("--choices", "A,B,…", "One of these. Repeat the option for texts with commas."),
]


def read_constraint(
    json_schema: str | None, regex: str | None, grammar: str | None, choices: Sequence[str] | None
) -> dict[str, Any]:
    """The options by the names of `SamplingParams`. Raises InputError: a file cannot be read."""
    if json_schema is not None and not json_schema.lstrip().startswith("{"):
        json_schema = _content("--json-schema", json_schema)
    if grammar is not None:
        grammar = _content("--grammar", grammar)
    if choices and len(choices) == 1:
        choices = [choice.strip() for choice in choices[0].split(",")]
    return {
        "json_schema": json_schema,
        "regex": regex,
        "grammar": grammar,
        "choices": tuple(choices) if choices else None,
    }


def _content(option: str, name: str) -> str:
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SOURCE + 1)
        if len(data) > MAX_SOURCE:
            raise InputError(f"is larger than {MAX_SOURCE} bytes", file=path, field=option)
        return data.decode("utf-8")
    except OSError as problem:
        raise InputError(f"cannot be read: {problem.strerror}", file=path, field=option) from None
    except UnicodeDecodeError as problem:
        raise InputError(f"is not UTF-8 at byte {problem.start}", file=path, field=option) from None
