"""Programs of typer, alike in their help: plain text, options under the name of what they do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import typer
import typer.core
from typer.models import CommandFunctionType

HELP = {"help_option_names": ["-h", "--help"]}


class GroupedHelp(typer.core.TyperCommand):
    """Plain help, with options under the name of what they are about."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                name = getattr(parameter, "rich_help_panel", None) or kind
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            if not records:  # the writer of columns takes no empty table
                continue
            with formatter.section(name):
                formatter.write_dl(records)


class Program(typer.Typer):
    """A program or a group of commands. Boxes do not survive narrow and dumb terminals, and
    rich's markup swallows what stands in brackets, such as a default.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(
            context_settings=HELP,
            pretty_exceptions_enable=False,
            add_completion=False,
            rich_markup_mode=None,
            **attributes,
        )

    def command(
        self, name: str | None = None, **attributes: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, cls=GroupedHelp, context_settings=HELP, **attributes)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for every field of a parameter that is a dataclass."""
    groups: dict[str, type] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, empty = parameter.annotation, parameter.empty
        if not is_dataclass(kind):
            options.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        groups[parameter.name], hints = kind, get_type_hints(kind, include_extras=True)
        options += [
            inspect.Parameter(
                field.name, parameter.KEYWORD_ONLY, annotation=hints[field.name],
                default=getattr(kind, field.name, empty),
            )
            for field in fields(kind)
        ]  # fmt: skip

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return called
