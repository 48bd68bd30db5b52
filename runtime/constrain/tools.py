"""Tools of an answer: validation, declaration to the template, and a grammar for their calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.errors import InputError
from edge.runtime.constrain.mask import LAYOUT, literal, open_mask
from edge.runtime.constrain.statement import KINDS, constraint_of
from edge.runtime.constrain.xml_rules import XmlRules
from edge.text.template import ChatTemplate
from edge.text.tokenizer import Segment, Tokenizer
from edge.text.tools import CallForm, CallReader, Declared
from edge.text.xml_calls import XmlForm

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KEYS = {"name", "description", "parameters", "strict"}


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may call.

    Attributes:
        declared: the tools in the OpenAI API's form.
        form: the model's format of tool calls.
        free: whether the answer may also be text; otherwise it must be calls.
        grammar: Lark grammar of the answer; None if nothing may be called.
        spelled: control token used in calls → its text.
    """

    declared: tuple[Declared, ...]
    form: CallForm
    free: bool
    grammar: str | None
    spelled: Mapping[int, str]

    def reader(self) -> CallReader | None:
        """Return a reader that finds calls in one answer; None if nothing may be called."""
        return None if self.grammar is None else self.form.reader(self.declared)

    def sampling(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters with the tools' grammar added.

        Raises InputError if they already have a constraint.
        """
        if self.grammar is None:
            return dict(given)
        if kinds := [kind for kind in KINDS if given.get(kind) is not None]:
            raise InputError("cannot be given together with tools", field=kinds[0])
        parameters = {**given, "grammar": self.grammar}
        if self.free and given.get("stop") is None:
            # free text ends at the model's own stop strings
            parameters["stop"] = defaults.get("stop")
        return parameters


def tool_use(
    tools: Sequence[Any] | None, choice: Any, parallel: bool,
    template: ChatTemplate, tokenizer: Tokenizer,
) -> ToolUse | None:  # fmt: skip
    """Validate the tools of an answer and compile their grammar; None without tools.

    Args:
        tools: each as the OpenAI API declares it, or its `function` alone; `parameters` may be a
            pydantic model.
        choice: "auto", "none", "required", or the name of the tool to call.
        parallel: whether the answer may contain several calls.
        template: chat template, which knows the model's format of tool calls.
        tokenizer: tokenizer of the model.

    Raises:
        InputError: lists every fault of the tools, or names the tool whose schema cannot be
            compiled.
    """
    if not tools:
        if choice not in (None, "auto", "none"):
            raise InputError("there are no tools to choose from", field="tool_choice")
        return None
    declared = _check_tools(tools)
    names = [tool["function"]["name"] for tool in declared]
    if choice not in ("auto", "none", "required", *names):
        raise InputError(f"unknown tool {choice!r:.60}", field="tool_choice",
                         remedy="auto, none, required, or the name of a tool")  # fmt: skip
    form = template.tools.form
    spelled = {
        part: tokenizer.id_to_piece(part)
        for part in tokenizer.split(Segment(form.head + form.joint + form.tail, trusted=True))
        if isinstance(part, int) and not tokenizer.token_bytes(part)
    }
    if choice == "none":
        return ToolUse(declared, form, True, None, spelled)
    named = choice in names
    callable_ = [tool for tool in declared if not named or tool["function"]["name"] == choice]
    rules = _ToolGrammar(tokenizer)
    try:
        source = rules.grammar(
            form, callable_, free=choice == "auto", several=parallel and not named
        )
    except (AttributeError, TypeError):  # from an invalid schema: compile each to find which
        _find_fault(declared, tokenizer)
        raise
    try:
        open_mask(tokenizer, constraint_of({"grammar": source}), continued=False)
    except InputError:
        _find_fault(declared, tokenizer)
        raise
    return ToolUse(declared, form, choice == "auto", source, spelled)


class _ToolGrammar:
    """Writes the grammar of an answer with tools."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def grammar(
        self, form: CallForm, tools: Sequence[Declared], *, free: bool, several: bool
    ) -> str:
        begin, trigger = self._text(form.head), form.trigger
        rest = "one"
        if several and form.joint:
            rest += f" ({self._text(form.joint)} one)*"
        rest += " " + self._text(form.tail)
        if not free:
            lines = [f"start: {begin} {rest}"]
        elif not trigger:  # free text may not begin like a call
            lines = [f"start: {begin} {rest} | TEXT", r"TEXT: /[^{\[\s](.|\n)*/"]
        else:
            marker, head = self._text(trigger), self._text(form.head[len(trigger) :])
            lazy = "" if marker.startswith("<") else "[lazy]"  # a control token ends text anyway
            lines = [f"start: before {head} {rest} | TEXT", f"before{lazy}: TEXT {marker}",
                     r"TEXT: /(.|\n)*/"]  # fmt: skip
        lines.append("one: " + " | ".join(f"one_{i}" for i in range(len(tools))))
        for index, tool in enumerate(tools):
            function = tool["function"]
            call_start = self._text(function["name"] + form.middle)
            if isinstance(form, XmlForm):
                lines.append(f"one_{index}: {call_start} given_{index}")
                rules = XmlRules(form, function, _layout(function), self._text, f"given_{index}")
                try:
                    lines += rules.rules()
                except InputError as fault:
                    field = f"tools: {function['name']}.parameters"
                    raise InputError(fault.message, field=field) from None
            else:
                lines.append(f"one_{index}: {call_start} %json {json.dumps(_schema(function))}")
        return "\n".join(lines)

    def _text(self, text: str) -> str:
        """Return text as Lark literals, with its control tokens, which have no bytes, by id."""
        return " ".join(
            literal(self._tokenizer.token_bytes(part).decode(errors="replace"))
            if isinstance(part, int) and self._tokenizer.token_bytes(part)
            else f"<[{part}]>"
            if isinstance(part, int)
            else literal(part)
            for part in self._tokenizer.split(Segment(text, trusted=True))
            if part != ""
        )


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments; additional ones must be allowed explicitly."""
    base = {"type": "object", "additionalProperties": False}
    return base | function["parameters"] | {"x-guidance": _layout(function)}


def _layout(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON layout of arguments; without `strict`, unknown keywords are ignored."""
    return LAYOUT if function.get("strict") else LAYOUT | {"lenient": True}


def _find_fault(declared: Sequence[Declared], tokenizer: Tokenizer) -> None:
    """Raise InputError naming the first tool whose schema cannot be compiled alone."""
    for index, tool in enumerate(declared):
        field = f"tools.{index}.function.parameters"
        try:
            constraint = constraint_of({"json_schema": _schema(tool["function"])})
            open_mask(tokenizer, constraint, continued=False)
        except InputError as fault:
            raise InputError(fault.message, field=field, remedy=fault.remedy) from None


def _check_tools(tools: Sequence[Any]) -> tuple[Declared, ...]:
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise InputError("must be a list", field="tools")
    if len(tools) > MAX_TOOLS:
        raise InputError(f"{len(tools)} tools, at most {MAX_TOOLS} allowed", field="tools")
    faults: list[str] = []
    declared: list[Declared] = []
    for index, tool in enumerate(tools):
        field = f"tools.{index}"
        if isinstance(tool, Mapping) and "function" in tool:
            if tool.get("type", "function") != "function" or set(tool) > {"type", "function"}:
                faults.append(f"{field} is not a function")
                continue
            tool, field = tool["function"], f"{field}.function"
        if not isinstance(tool, Mapping):
            faults.append(f"{field} must be an object")
            continue
        function = {key: value for key, value in tool.items() if value is not None}
        function["parameters"] = _plain_parameters(function.get("parameters", {}))
        function_faults = _function_faults(function)
        faults += [f"{field}{fault}" for fault in function_faults]
        if not function_faults:
            declared.append({"type": "function", "function": function})
    names = [tool["function"]["name"] for tool in declared]
    faults += [f"tools: {name} appears twice" for name in {n for n in names if names.count(n) > 1}]
    if faults:
        raise InputError("; ".join(faults), field="tools")
    return tuple(declared)


def _plain_parameters(parameters: Any) -> Any:
    if hasattr(parameters, "model_json_schema"):
        parameters = parameters.model_json_schema()
    try:
        plain = json.loads(json.dumps(parameters, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None
    # plain JSON values, and always `properties`, which templates expect
    return {"type": "object", "properties": {}} | plain if isinstance(plain, dict) else plain


def _function_faults(function: Mapping[str, Any]) -> list[str]:
    faults = [f".{name} is unknown" for name in sorted(set(function) - _KEYS)]
    name, parameters = function.get("name"), function["parameters"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        faults.append(".name must be 1 to 64 of a-z, A-Z, 0-9, _ and -")
    if not isinstance(function.get("description", ""), str):
        faults.append(".description must be a text")
    if not isinstance(function.get("strict", False), bool):
        faults.append(".strict must be true or false")
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        faults.append(".parameters must be the JSON schema of an object")
    return faults
