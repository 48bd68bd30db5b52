"""Tool calls: how a chat template writes them, and how they are read from a streamed answer.

A template is probed: it renders a conversation with one call and one with two, and the text around
names and arguments is its form. This works for all templates that write a name and then arguments
as JSON, one by one or in a list, or as one element per argument (`xml_calls`). A template that
declares tools but writes no calls is recognised by its marker. For all others the system message
declares tools and asks for calls in the form of Hermes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from edge.errors import InputError, TokenizerError

Declared = Mapping[str, Any]  # a tool as the OpenAI API declares it
_LIST = re.compile(r'(\[\s*)?\{\s*"\w+":\s*"$')  # the JSON before a name


@dataclass(frozen=True)
class ToolCall:
    """A tool call of an answer.

    Attributes:
        source: arguments as the model wrote them, a JSON object.
    """

    id: str
    name: str
    source: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        parsed: dict[str, Any] = json.loads(self.source)
        return parsed

    def declared(self) -> dict[str, Any]:
        """Return the call as templates take it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class CallDelta:
    """A streamed piece of a call: its beginning, with id and name, or more of its arguments."""

    index: int
    text: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class CallForm:
    """How calls are written: the text around their names and arguments.

    Attributes:
        head: text before the first name.
        middle: text between a name and its arguments.
        joint: text between calls; "" means that there is at most one call.
        tail: text at the end.
    """

    head: str
    middle: str
    joint: str
    tail: str

    @property
    def trigger(self) -> str:
        """Text that begins a call anywhere; "" means that only an answer's first text can."""
        begins = _LIST.search(self.head)
        return (self.head[: begins.start()] if begins else self.head).rstrip()

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Write calls as an answer does."""
        written = [f"{call.name}{self.middle}{call.source}" for call in calls]
        return self.head + self.joint.join(written) + self.tail

    def reader(self, tools: Sequence[Declared]) -> CallReader:
        """Return a reader that finds calls of these tools in one answer."""
        return CallReader(self)


def json_form(begin: str, end: str, listed: bool = False) -> CallForm:
    """Return the form of JSON calls between markers, each its own or all in one list."""
    item = '{"name": "'
    if listed:
        return CallForm(f"{begin}[{item}", '", "arguments": ', "}, " + item, f"}}]{end}")
    return CallForm(f"{begin}{item}", '", "arguments": ', f"}}{end}\n{begin}{item}", f"}}{end}")


HERMES = json_form("<tool_call>\n", "\n</tool_call>")
_BY_MARKER = {
    "<|tool_call|>": json_form("<|tool_call|>", "", listed=True),
    "<TOOLCALL>": json_form("<TOOLCALL>", "</TOOLCALL>", listed=True),
    "[TOOL_CALLS]": json_form("[TOOL_CALLS]", "", listed=True),
    "<tool_call>": HERMES,
}
_NO_JSON = ("<function=", "<arg_key>")  # in templates whose `<tool_call>` holds no JSON


@dataclass(frozen=True)
class ToolSupport:
    """A template's support for tools.

    Attributes:
        form: form of calls.
        declares: whether it writes the available tools.
        writes: whether it writes earlier calls.
        answers: whether it writes the results of tools.
    """

    form: CallForm
    declares: bool
    writes: bool
    answers: bool


Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Declared] | None], str]
_NAMES, _KEY, _ID = ("probe_one", "probe_two"), {"probe_key": "probe_value"}, "probe0000"
_ARGUMENTS = re.compile(r'\{\s*"probe_key":\s*"probe_value"\s*\}')
MAX_NAME = 1000  # characters of a call's name; longer text is not a call
MAX_SPACE = 1000  # characters of white space held back because a call may follow
MAX_FORM = 1000  # characters of each part; answers are searched for it piece by piece


# (number of calls, arguments of each) → the text that a template writes
Written = Callable[[int, Mapping[str, Any]], str]


def support(
    render: Render, source: str, other: Callable[[Written, Sequence[str]], CallForm | None]
) -> ToolSupport:
    """Probe a template for its support of tools.

    Args:
        render: plain rendering of (messages, tools), without a generation prompt; may raise
            InputError and TokenizerError.
        source: text of the template.
        other: finds a form whose arguments are not JSON, from calls with the given names.
    """

    def rendered(turn: Mapping[str, Any], after: Mapping[str, Any]) -> str:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", **turn}, after]
        try:
            return render(messages, tools)
        except (InputError, TokenizerError):
            return ""

    parameters = {"type": "object", "properties": {"probe_key": {"type": "string"}}}
    tools = [{"type": "function", "function": {
        "name": name, "description": "", "parameters": parameters}} for name in _NAMES]  # fmt: skip
    question = {"role": "user", "content": "z"}
    plain = rendered({"content": "\u2603"}, question)
    declares = _NAMES[0] in plain
    before, _, after = plain.partition("\u2603")

    def calling_turn(count: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        calls = [{"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}}
                 for name in _NAMES[:count]]  # fmt: skip
        return {"content": "", "tool_calls": calls}

    def written(count: int, arguments: Mapping[str, Any] = _KEY) -> str:
        text = rendered(calling_turn(count, arguments), question)
        start = before.rstrip()
        if not text.startswith(start) or not text.endswith(after):
            return ""
        return text[len(start) : len(text) - len(after)].lstrip()

    head, middle, tail = _split_around_call(written(1))
    joint = _before_last(_split_around_call(written(2))[2])
    form: CallForm | None = CallForm(head, middle, joint, tail)
    if not (head and middle):
        form = other(written, _NAMES) if declares else None
    parts = [] if form is None else [getattr(form, field.name) for field in fields(form)]
    if _ID in "".join(parts) or max(map(len, parts), default=0) > MAX_FORM:
        form = None
    result = {"role": "tool", "content": "probe_result", "tool_call_id": _ID}
    answers = "probe_result" in rendered(
        calling_turn(1, _KEY) if form else {"content": "y"}, result
    )
    if form is not None:
        return ToolSupport(form, declares, True, answers)
    marked_form = None
    if not any(part in source for part in _NO_JSON):
        marked_form = next((form for marker, form in _BY_MARKER.items() if marker in source), None)
    # if the form is unknown, edge declares the tools itself
    return ToolSupport(marked_form or HERMES, declares and marked_form is not None, False, answers)


def _split_around_call(text: str) -> tuple[str, str, str]:
    """Return the text before the first name, from it to its arguments, and after them.

    Not by one regular expression: it would try each of the 100,000 times that a template may write
    a name.
    """
    head, _, rest = text.partition(_NAMES[0])
    match = _ARGUMENTS.search(rest)
    return (head, rest[: match.start()], rest[match.end() :]) if match else ("", "", "")


def _before_last(text: str) -> str:
    """Return the text before the last name that is followed by arguments; "" without one."""
    positions = [match.start() for match in _ARGUMENTS.finditer(text)]
    return text[: max(0, text.rfind(_NAMES[1], 0, positions[-1]))] if positions else ""


def described(tools: Sequence[Declared], form: CallForm) -> str:
    """Return a system message that declares tools, for templates that do not."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    example = form.head + 'NAME", "arguments": {…}' + form.tail
    return "\n".join(["You can call these functions:", *lines, "To call one, write:", example])


class CallReader:
    """Separates calls from the text around them while both are streamed.

    Attributes:
        calls: complete calls.
        deltas: new pieces of calls; the consumer removes them.
    """

    def __init__(self, form: CallForm) -> None:
        self.calls: list[ToolCall] = []
        self.deltas: list[CallDelta] = []
        self._form = form
        self._held, self._searched = "", 0
        self._lead = form.head  # text before the current name
        self._step = self._text if form.trigger else self._beginning
        self._id = self._name = self._source = ""
        self._depth, self._quoted, self._escaped = 0, False, False

    def feed(self, text: str) -> str:
        """Return the text that is certain not to be part of a call."""
        self._held += text
        shown = ""
        while True:
            step, left = self._step, len(self._held)
            shown += step()
            if self._step == step and len(self._held) == left:
                return shown

    def finish(self) -> str:
        """Return the rest, when the answer ends."""
        return self._take(len(self._held)) if self._step in (self._text, self._beginning) else ""

    def _take(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        self._searched = 0
        return out

    # An answer comes in many pieces. Each is searched once, however much text is held back.

    def _find(self, text: str) -> int:
        """Return where `text` begins in the held text, or -1."""
        at = self._held.find(text, max(0, self._searched - len(text) + 1))
        self._searched = len(self._held)
        return at

    def _begun(self, text: str) -> int:
        """Return where the held text ends with a prefix of `text`, or its length if it does not."""
        size = len(self._held)
        ends = range(max(0, size - len(text) + 1), size)
        return next((i for i in ends if text.startswith(self._held[i:])), size)

    # -- steps, named after what comes next ------------------------------------------------------

    def _text(self) -> str:
        trigger = self._form.trigger
        if not trigger:
            return self._take(len(self._held))
        at = self._find(trigger)
        if at >= 0:
            self._step = self._head
            before = self._take(at)
            return before.rstrip()
        # white space before a call is not text
        prefix_start = self._begun(trigger)
        return self._take(max(len(self._held[:prefix_start].rstrip()), prefix_start - MAX_SPACE))

    def _beginning(self) -> str:
        """Look for a call in a form without a marker: only an answer's first text can be one."""
        self._take(len(self._held) - len(self._held.lstrip()))
        if self._held.startswith(self._form.head):
            self._step = self._head
        elif not self._form.head.startswith(self._held):
            self._step = self._text
        return ""

    def _head(self) -> str:
        if len(self._held) >= len(self._form.head):
            self._lead = self._take(len(self._form.head))
            self._step = self._call_name
        return ""

    def _call_name(self) -> str:
        at = self._find(self._form.middle)
        if at > MAX_NAME or (at < 0 and len(self._held) > MAX_NAME + len(self._form.middle)):
            self._step = self._text
            return self._lead + self._take(len(self._held))
        if at >= 0:
            self._id, self._name = f"call_{secrets.token_hex(12)}", self._take(at)
            self._take(len(self._form.middle))
            self._source, self._step = "", self._arguments
            self.deltas.append(CallDelta(len(self.calls), "", self._id, self._name))
        return ""

    def _arguments(self) -> str:
        size = next((i for i, c in enumerate(self._held, 1) if self._closes(c)), len(self._held))
        text = self._take(size)
        self._source += text
        if text:
            self.deltas.append(CallDelta(len(self.calls), text))
        if self._source and not self._depth:
            self.calls.append(ToolCall(self._id, self._name, self._source))
            self._step = self._after
        return ""

    def _closes(self, character: str) -> bool:
        """Return whether a character of JSON closes the outermost object."""
        if self._escaped:
            self._escaped = False
        elif self._quoted and character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = not self._quoted
        elif not self._quoted:
            self._depth += (character in "{[") - (character in "}]")
        return not self._depth

    def _after(self) -> str:
        if self._form.joint and self._held.startswith(self._form.joint):
            self._lead = self._take(len(self._form.joint))
            self._step = self._call_name
        return ""
