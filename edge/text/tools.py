"""How a chat template writes calls of tools, and calls read from an answer while it is made.

A template is asked: it renders a conversation with one call and one with two, and what stands
around names and arguments is its form. So all templates are read that write a name and then
arguments as JSON, one by one or in a list, or an element for each (`xml_calls`). A template that
declares tools but writes no calls is known by its marker. For all others the system message
declares tools and asks for calls as Hermes writes them.
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
_LIST = re.compile(r'(\[\s*)?\{\s*"\w+":\s*"$')  # where the JSON begins before a name


@dataclass(frozen=True)
class ToolCall:
    """A call that an answer makes.

    Attributes:
        source: the arguments as the model wrote them, JSON of an object.
    """

    id: str
    name: str
    source: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by their names."""
        found: dict[str, Any] = json.loads(self.source)
        return found

    def declared(self) -> dict[str, Any]:
        """As templates take it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class CallDelta:
    """What joins a call while it is written: its beginning, with id and name, or more of `text`."""

    index: int
    text: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class CallForm:
    """The text before the first name, between name and arguments, between calls, at the end.
    There is one call at most where `joint` is "".
    """

    head: str
    middle: str
    joint: str
    tail: str

    @property
    def trigger(self) -> str:
        """Text that begins a call wherever it occurs; "": only an answer's first text does."""
        begins = _LIST.search(self.head)
        return (self.head[: begins.start()] if begins else self.head).rstrip()

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls as an answer writes them."""
        written = [f"{call.name}{self.middle}{call.source}" for call in calls]
        return self.head + self.joint.join(written) + self.tail

    def reader(self, tools: Sequence[Declared]) -> CallReader:
        """What finds calls of these tools in one answer."""
        return CallReader(self)


def _form(begin: str, end: str, listed: bool = False) -> CallForm:
    item = '{"name": "'
    if listed:
        return CallForm(f"{begin}[{item}", '", "arguments": ', "}, " + item, f"}}]{end}")
    return CallForm(f"{begin}{item}", '", "arguments": ', f"}}{end}\n{begin}{item}", f"}}{end}")


HERMES = _form("<tool_call>\n", "\n</tool_call>")
_BY_MARKER = {
    "<|tool_call|>": _form("<|tool_call|>", "", listed=True),
    "<TOOLCALL>": _form("<TOOLCALL>", "</TOOLCALL>", listed=True),
    "[TOOL_CALLS]": _form("[TOOL_CALLS]", "", listed=True),
    "<tool_call>": HERMES,
}
_NO_JSON = ("<function=", "<arg_key>")  # in what is between `<tool_call>` and its end


@dataclass(frozen=True)
class ToolSupport:
    """What a template knows of tools.

    Attributes:
        form: of calls. declares: it writes what tools there are. writes: it writes earlier calls.
        answers: it writes what tools returned.
    """

    form: CallForm
    declares: bool
    writes: bool
    answers: bool


Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Declared] | None], str]
_NAMES, _KEY, _ID = ("probe_one", "probe_two"), {"probe_key": "probe_value"}, "probe0000"
_ARGUMENTS = re.compile(r'\{\s*"probe_key":\s*"probe_value"\s*\}')
MAX_NAME = 1000  # characters of a call's name: what is longer is no call
MAX_SPACE = 1000  # characters of white space that are held back, since a call may follow
MAX_FORM = 1000  # characters of each part; answers are searched for it piece by piece


# of a number of calls, all with these arguments: what a template writes
Written = Callable[[int, Mapping[str, Any]], str]


def support(
    render: Render, source: str, other: Callable[[Written, Sequence[str]], CallForm | None]
) -> ToolSupport:
    """Ask a template. `render(messages, tools)`: the plain rendering, without a prompt for an
    answer; may raise InputError and TokenizerError. `source`: of the template. `other`: finds forms
    whose arguments are no JSON, of calls with these names.
    """

    def rendered(said: Mapping[str, Any], after: Mapping[str, Any]) -> str:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", **said}, after]
        try:
            return render(messages, tools)
        except (InputError, TokenizerError):
            return ""

    parameters = {"type": "object", "properties": {"probe_key": {"type": "string"}}}
    tools = [{"type": "function", "function": {
        "name": name, "description": "", "parameters": parameters}} for name in _NAMES]  # fmt: skip
    asked = {"role": "user", "content": "z"}
    plain = rendered({"content": "\u2603"}, asked)
    declares = _NAMES[0] in plain
    before, _, after = plain.partition("\u2603")

    def called(count: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        calls = [{"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}}
                 for name in _NAMES[:count]]  # fmt: skip
        return {"content": "", "tool_calls": calls}

    def written(count: int, arguments: Mapping[str, Any] = _KEY) -> str:
        found = rendered(called(count, arguments), asked)
        start = before.rstrip()
        if not found.startswith(start) or not found.endswith(after):
            return ""
        return found[len(start) : len(found) - len(after)].lstrip()

    head, middle, tail = _around(written(1))
    joint = _before_last(_around(written(2))[2])
    form: CallForm | None = CallForm(head, middle, joint, tail)
    if not (head and middle):
        form = other(written, _NAMES) if declares else None
    parts = [] if form is None else [getattr(form, one.name) for one in fields(form)]
    if _ID in "".join(parts) or max(map(len, parts), default=0) > MAX_FORM:
        form = None
    result = {"role": "tool", "content": "probe_result", "tool_call_id": _ID}
    answers = "probe_result" in rendered(called(1, _KEY) if form else {"content": "y"}, result)
    if form is not None:
        return ToolSupport(form, declares, True, answers)
    known = None
    if not any(part in source for part in _NO_JSON):
        known = next((form for marker, form in _BY_MARKER.items() if marker in source), None)
    # where the form is not known, tools are declared in our words
    return ToolSupport(known or HERMES, declares and known is not None, False, answers)


def _around(text: str) -> tuple[str, str, str]:
    """What a template wrote before the first name, before its arguments, and after them. By hand,
    for a template may write a name 100,000 times and an expression would try each.
    """
    head, _, rest = text.partition(_NAMES[0])
    found = _ARGUMENTS.search(rest)
    return (head, rest[: found.start()], rest[found.end() :]) if found else ("", "", "")


def _before_last(text: str) -> str:
    """The text before the last name that arguments come after; "" without one."""
    places = [found.start() for found in _ARGUMENTS.finditer(text)]
    return text[: max(0, text.rfind(_NAMES[1], 0, places[-1]))] if places else ""


def described(tools: Sequence[Declared], form: CallForm) -> str:
    """A system message's words about tools, for templates that have none."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    example = form.head + 'NAME", "arguments": {…}' + form.tail
    return "\n".join(["You can call these functions:", *lines, "To call one, write:", example])


class CallReader:
    """Separates calls from the text around them, while both are streamed.

    Attributes:
        calls: those that are complete.
        deltas: what has joined calls; whoever tells of it takes it away.
    """

    def __init__(self, form: CallForm) -> None:
        self.calls: list[ToolCall] = []
        self.deltas: list[CallDelta] = []
        self._form = form
        self._held, self._looked = "", 0
        self._lead = form.head  # what stood before the name that is read
        self._step = self._text if form.trigger else self._beginning
        self._id = self._name = self._source = ""
        self._depth, self._quoted, self._escaped = 0, False, False

    def feed(self, text: str) -> str:
        """The text that is certain not to be a call's."""
        self._held += text
        shown = ""
        while True:
            step, left = self._step, len(self._held)
            shown += step()
            if self._step == step and len(self._held) == left:
                return shown

    def finish(self) -> str:
        """The rest, when the answer ends."""
        return self._take(len(self._held)) if self._step in (self._text, self._beginning) else ""

    def _take(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        self._looked = 0
        return out

    # An answer comes in many pieces: each is searched once, however much is held before it.

    def _find(self, text: str) -> int:
        """Where a text begins in what is held, -1 where it does not."""
        at = self._held.find(text, max(0, self._looked - len(text) + 1))
        self._looked = len(self._held)
        return at

    def _begun(self, text: str) -> int:
        """Where what is held may end with a text's beginning; its length where it does not."""
        size = len(self._held)
        ends = range(max(0, size - len(text) + 1), size)
        return next((i for i in ends if text.startswith(self._held[i:])), size)

    # -- steps: what stands next -----------------------------------------------------------------

    def _text(self) -> str:
        trigger = self._form.trigger
        if not trigger:
            return self._take(len(self._held))
        at = self._find(trigger)
        if at >= 0:
            self._step = self._head
            before = self._take(at)
            return before.rstrip()
        # white space before a call is no text
        begun = self._begun(trigger)
        return self._take(max(len(self._held[:begun].rstrip()), begun - MAX_SPACE))

    def _beginning(self) -> str:
        """Look for a call in a form that nothing marks: only an answer's first text can be one."""
        self._take(len(self._held) - len(self._held.lstrip()))
        if self._held.startswith(self._form.head):
            self._step = self._head
        elif not self._form.head.startswith(self._held):
            self._step = self._text
        return ""

    def _head(self) -> str:
        if len(self._held) >= len(self._form.head):
            self._lead = self._take(len(self._form.head))
            self._step = self._named
        return ""

    def _named(self) -> str:
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
        """Whether a character of JSON closes its outermost object."""
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
            self._step = self._named
        return ""
