"""Typer programs with uniform help: plain text, with options grouped by topic."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import typer
import typer.core
from typer.models import CommandFunctionType

from edge.apps.terminal import harmless
from edge.errors import Faults, InputError

# newer versions of typer have a copy of click of their own
_UsageError: Any = typer.BadParameter.__base__
HELP = {"help_option_names": ["-h", "--help"]}
# as click writes it behind an option's help: [default: 5; 1<=x<=10000]
_RANGE = re.compile(r"(?<=[\[ ])(?:([\d.]+)<=)?x([<>])=([\d.]+)(?=\]$)")


def typed(program: str) -> str:
    """Return what to type for a program of this package: its name if the shell finds it, or the
    path to it, as `.venv/bin/edge`.
    """
    path = Path(sysconfig.get_path("scripts"), program)
    if shutil.which(program) or not path.exists():
        return program
    return min(str(path), os.path.relpath(path), key=len)


@contextmanager
def _harmless_usage() -> Iterator[None]:
    """Make what a usage error repeats of the command line harmless; typer prints it itself."""
    try:
        yield
    except _UsageError as problem:
        text = problem.format_message()
        if harmless(text) == text:
            raise
        raise _UsageError(harmless(text), ctx=problem.ctx) from None


class HarmlessGroup(typer.core.TyperGroup):
    """Group of commands whose usage errors are harmless text."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _harmless_usage():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _harmless_usage():
            return super().invoke(ctx)


class GroupedHelp(typer.core.TyperCommand):
    """Command with plain help, in which options are grouped by topic."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _harmless_usage():
            return super().make_context(*args, **options)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                names, text = record
                # the type beside a name: <int range>, <list[str]>
                names = re.sub(r"<(?:list\[(\w+)\]|(\w+) range)>", r"<\1\2>", names)
                record = names, _RANGE.sub(_describe_range, text)
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                name = getattr(parameter, "rich_help_panel", None) or kind
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            if not records:  # write_dl fails on an empty table
                continue
            with formatter.section(name):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Raises InputError that lists all invalid values."""
        arguments = list(args)  # the parser consumes its list
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as problem:
            self._raise_faults(ctx, arguments)
            raise problem

    def _raise_faults(self, ctx: Any, arguments: list[str]) -> None:
        """Raise InputError with every invalid value; return if values are only missing."""
        values = self.make_parser(ctx).parse_args(args=arguments)[0]
        faults, missing = Faults(), Faults()
        for parameter in self.get_params(ctx):
            try:
                parameter.handle_parse_result(ctx, values, [])
            except typer.BadParameter as problem:
                if "Missing" in type(problem).__name__:
                    missing.add(str(parameter.name), "is missing")
                else:
                    faults.add(max(parameter.opts, key=len), _describe_fault(problem, parameter))
        if faults:
            faults.extend(missing)
        faults.refuse(InputError)


def _describe_fault(problem: typer.BadParameter, parameter: Any) -> str:
    """Say what is wrong with an option's value, without the parser's words about schemas."""
    cause: Any = problem.__cause__
    descriptor = getattr(parameter, "type_descriptor", None)
    if descriptor is None or not hasattr(cause, "errors"):
        return problem.message.rstrip(".")
    received = f"not {str(cause.errors()[0]['input'])!r:.60}"
    if descriptor.is_choice:
        *others, last = (str(getattr(choice, "value", choice)) for choice in descriptor.choices)
        return f"must be {', '.join(others)} or {last}, {received}"
    kind, info = descriptor.annotation, descriptor.parameter_info
    if kind not in (int, float):
        return problem.message.rstrip(".")
    minimum, maximum = (
        None if bound is None else _readable(bound) for bound in (info.min, info.max)
    )
    requirement = "a whole number" if kind is int else "a number"
    if minimum is not None and maximum is not None:
        requirement += f" from {minimum} to {maximum}"
    elif minimum is not None:
        requirement += f" of at least {minimum}"
    elif maximum is not None:
        requirement += f" of at most {maximum}"
    return f"must be {requirement}, {received}"


def _describe_range(found: re.Match[str]) -> str:
    low, sign, bound = found.groups()
    bound = _readable(float(bound))
    if low is not None:
        return f"{_readable(float(low))} to {bound}"
    return f"at least {bound}" if sign == ">" else f"at most {bound}"


def _readable(bound: float) -> str:
    return f"{bound:,}".removesuffix(".0")


class CommandGroup(typer.Typer):
    """Program or group of commands, without rich's help.

    Boxes break on narrow and dumb terminals, and rich's markup swallows text in brackets, such as
    a default.
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
    """Replace each dataclass parameter of a command by one option per field."""
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
    def wrapper(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    wrapper.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return wrapper
