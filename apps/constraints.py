"""Options that constrain answers to a JSON schema, a regex, a grammar or a list of choices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edge.errors import InputError
from edge.runtime.constrain.statement import MAX_SOURCE

_PANEL = "Constrained answers"


def _option(name: str, metavar: str, help_text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help_text, rich_help_panel=_PANEL)


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """A group of options: the constraint that an answer must satisfy."""

    json_schema: Annotated[
        str | None,
        _option("--json-schema", "FILE", "Answer in JSON of this schema: a file, or {…} itself."),
    ] = None
    regex: Annotated[
        str | None, _option("--regex", "EXPRESSION", "Answer with text that matches this.")
    ] = None
    grammar: Annotated[
        str | None, _option("--grammar", "FILE", "Answer with text of this Lark grammar.")
    ] = None
    choices: Annotated[
        list[str] | None,
        _option(
            "--choices", "A,B,…", "Answer with one of these. For texts with commas, repeat it."
        ),
    ] = None

    def read(self) -> dict[str, Any]:
        """Return the options under the names of `SamplingParams`.

        Raises InputError when a file cannot be read.
        """
        schema, choices = self.json_schema, self.choices
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = _read_file("--json-schema", schema)
        if choices and len(choices) == 1:
            choices = [choice.strip() for choice in choices[0].split(",")]
        return {
            "json_schema": schema,
            "regex": self.regex,
            "grammar": None if self.grammar is None else _read_file("--grammar", self.grammar),
            "choices": tuple(choices) if choices else None,
        }


def _read_file(option: str, name: str) -> str:
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
