"""Options that hold an answer to a form: what they mean, read from text or from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edge.errors import InputError
from edge.runtime.constrain.statement import MAX_SOURCE

_PANEL = "What an answer has to be"


def _form(name: str, metavar: str, says: str) -> Any:
    return typer.Option(name, metavar=metavar, help=says, rich_help_panel=_PANEL)


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """A group of options: the form that an answer has to have."""

    json_schema: Annotated[
        str | None,
        _form("--json-schema", "FILE", "JSON of this schema; {…} instead of a file too."),
    ] = None
    regex: Annotated[str | None, _form("--regex", "EXPRESSION", "Text that matches this.")] = None
    grammar: Annotated[str | None, _form("--grammar", "FILE", "Text of this Lark grammar.")] = None
    choices: Annotated[
        list[str] | None,
        _form("--choices", "A,B,…", "One of these. Repeat the option for texts with commas."),
    ] = None

    def read(self) -> dict[str, Any]:
        """By the names of `SamplingParams`. Raises InputError for a file that cannot be read."""
        schema, choices = self.json_schema, self.choices
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = _content("--json-schema", schema)
        if choices and len(choices) == 1:
            choices = [choice.strip() for choice in choices[0].split(",")]
        return {
            "json_schema": schema,
            "regex": self.regex,
            "grammar": None if self.grammar is None else _content("--grammar", self.grammar),
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
