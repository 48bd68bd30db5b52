"""Chat templates: they turn messages into a prompt in which typed text cannot forge special tokens.

A template is rendered with every message's text between two private marks. They tell afterwards
which text came from the template (trusted: its special tokens count) and which was typed (plain).
An answer whose tokens are known enters the prompt as those tokens, so that a conversation's state
is reused exactly.

A template that rewrites message text loses the marks. Then text is trimmed beforehand, as most such
templates do. If that does not explain the difference either, typed special tokens are broken up
with a mark before rendering, and the result must have the special tokens of a rendering of harmless
text. Otherwise the conversation is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from edge.errors import Faults, InputError, TokenizerError
from edge.text import xml_calls
from edge.text.jinja import ParsedTemplate
from edge.text.jinja_values import TemplateRaised
from edge.text.tokenizer import Segment, Tokenizer, check_text
from edge.text.tools import Declared, ToolCall, ToolSupport, described, support

MAX_TEMPLATE = 256 << 10  # bytes
MAX_MESSAGES = 10_000
ROLE = re.compile(r"[a-z][a-z_]{0,31}")
ROLES = ("system", "user", "assistant", "tool", "developer")
REMEDY = "export the model with another chat template"


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        tokens: ids that an answer was generated as, if known.
        tool_calls: calls that an answer made.
        tool_call_id: id of the call whose result a `tool` message holds.
    """

    role: str
    content: str
    tokens: tuple[int, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class ChatTemplate:
    """A parsed chat template. Threads may share it."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, file: str = "chat template") -> None:
        """Raises TokenizerError when `source` is too large, malformed or unsupported."""
        self.file = file
        self._tokenizer = tokenizer
        if len(source.encode("utf-8", errors="replace")) > MAX_TEMPLATE:
            raise TokenizerError(f"is larger than {MAX_TEMPLATE} bytes", file=file, remedy=REMEDY)
        try:
            self._program = ParsedTemplate(source)
            self._source = source
        except (TemplateError, RecursionError, ValueError, OverflowError) as problem:
            line = getattr(problem, "lineno", None)
            where = f"line {line}: " if line else ""
            raise TokenizerError(
                f"cannot be compiled: {where}{problem}", file=file, remedy=REMEDY
            ) from None

    @cached_property
    def tools(self) -> ToolSupport:
        """The template's support for tools."""
        return support(
            lambda messages, tools: self._run(messages, False, tools), self._source, xml_calls.found
        )

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Declared] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the plain text, as transformers' `apply_chat_template(tokenize=False)` does."""
        return self._render(self._adapted(messages, tools), str, add_generation_prompt, tools)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Declared] = (),
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        """Return the prompt in segments, for `Tokenizer.encode_segments`.

        `tools` are declared as in the OpenAI API. Raises InputError when edge or the template
        refuses a role or text, and TokenizerError when the template fails, exceeds its limits, or
        rewrites text beyond recognition.
        """
        check_messages(messages)
        self._check_spelling(messages)
        messages = self._adapted(messages, tools)
        plain = self._render(messages, str, add_generation_prompt, tools)
        marks = _free_marks([plain, *(message.content for message in messages)])
        breaking = marks[_BREAK]
        for trim in (False, True):
            contents = (_mark(marks, i, m.content, trim) for i, m in enumerate(messages))
            marked = self._render(
                [replace(m, content=next(contents)) for m in messages],
                lambda text: self._break_specials(text, breaking), add_generation_prompt, tools,
            )  # fmt: skip
            if _without(marks, marked) == plain:
                segments = _split_marked(marks, marked, messages, self.gap)
                if segments is not None:
                    return [
                        part for segment in segments for part in self._resolve(segment, breaking)
                    ]
        return self._render_broken(messages, breaking, plain, add_generation_prompt, tools)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Declared] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of the prompt. If the tokenizer adds `bos`, it comes first, and once."""
        segments = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        ids = self._tokenizer.encode_segments(segments)
        bos = self._tokenizer.bos
        if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    @cached_property
    def gap(self) -> str:
        """White space that the template writes before earlier answers but not before a new one.

        `Assistant: yes` follows a prompt that ends in `Assistant:` because the model generates the
        space itself: it belongs to the known tokens of the answer.
        """
        question, answer = Message("user", "x"), Message("assistant", "y")
        try:
            prompt = self._render([question], str, True)
            earlier = self._render([question, answer], str, False)
        except (InputError, TokenizerError):
            return ""  # the template requires another kind of conversation
        between = earlier.removeprefix(prompt).partition("y")[0]
        return between if earlier.startswith(prompt) and between.isspace() else ""

    def _adapted(self, messages: Sequence[Message], tools: Sequence[Declared]) -> list[Message]:
        """Return the messages in the form that the template supports.

        Calls whose tokens are known become text, as does everything about tools that the template
        does not support.
        """
        adapted = []
        if tools and not self.tools.declares:
            declaration = described(tools, self.tools.form)
            system = messages[0].content if messages[:1] and messages[0].role == "system" else ""
            adapted = [Message("system", f"{system}\n\n{declaration}" if system else declaration)]
            messages = messages[1:] if system else messages
        for message in messages:
            calls = message.tool_calls
            if calls and (message.tokens is not None or not self.tools.writes):
                written = self.tools.form.write(calls)
                text = f"{message.content}\n{written}" if message.content else written
                message = replace(message, content=text, tool_calls=())
            elif message.role == "tool" and not (self.tools.declares and self.tools.answers):
                text = f"<tool_response>\n{message.content}\n</tool_response>"
                message = Message("user", text)
            adapted.append(message)
        return adapted

    def _check_spelling(self, messages: Sequence[Message]) -> None:
        """Raise InputError for misspelt usual roles.

        Roles that the template names pass, and so do roles that resemble none of the usual ones:
        the template judges them.
        """
        unusual = (
            (index, message.role)
            for index, message in enumerate(messages)
            if message.role not in ROLES and not re.search(rf"\b{message.role}\b", self._source)
        )
        misspelt = [
            (index, role, _role_suggestion(role))
            for index, role in unusual
            if _role_suggestion(role)
        ]
        if not misspelt:
            return
        faults = Faults()
        for index, role, suggestion in misspelt:
            faults.add(f"messages.{index}.role", f"unknown role {role!r}", suggestion)
        faults.refuse(InputError)

    def _break_specials(self, text: str, mark: str) -> str:
        """Return the text with its special tokens broken up by marks."""
        parts, done = [], 0
        for at in self._tokenizer.special_finder.starts(text):
            parts += [text[done : at + 1], mark]
            done = at + 1
        return "".join(parts) + text[done:]

    def _resolve(self, segment: Segment, mark: str) -> Iterable[Segment]:
        """Yield a segment without the marks that kept typed special tokens from being found."""
        if not segment.trusted or mark not in segment.text:
            yield segment
            return
        for part in self._tokenizer.split(segment):
            yield (
                Segment("", tokens=(part,))
                if isinstance(part, int)
                else Segment(part.replace(mark, ""))
            )

    def _render_broken(
        self, messages: Sequence[Message], mark: str, plain: str,
        add_generation_prompt: bool, tools: Sequence[Declared],
    ) -> list[Segment]:  # fmt: skip
        def break_specials(text: str) -> str:
            return self._break_specials(text, mark)

        def rendered(content: Callable[[str], str]) -> str:
            rewritten = [replace(m, content=content(m.content)) for m in messages]
            return self._render(rewritten, break_specials, add_generation_prompt, tools)

        marked = rendered(break_specials)
        neutral = rendered(lambda text: "x" if text else "")
        find = self._tokenizer.find_specials
        if marked.replace(mark, "") != plain or find(marked) != find(neutral):
            raise TokenizerError(
                "rewrites messages, so that typed text cannot be told from special tokens",
                file=self.file,
                remedy=f"leave special tokens out of the messages, or {REMEDY}",
            )
        return list(self._resolve(Segment(marked + mark, trusted=True), mark))

    def _render(
        self, messages: Sequence[Message], text: Callable[[str], str],
        add_generation_prompt: bool, tools: Sequence[Declared] = (),
    ) -> str:  # fmt: skip
        """Render. `text` is applied to all strings in calls and in declarations of tools."""
        conversation = []
        for message in messages:
            entry: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.tool_calls:
                entry["tool_calls"] = _map_strings([c.declared() for c in message.tool_calls], text)
            if message.tool_call_id is not None:
                entry["tool_call_id"] = text(message.tool_call_id)
            conversation.append(entry)
        declared = _map_strings(tools, text) if tools and self.tools.declares else None
        return self._run(conversation, add_generation_prompt, declared)

    def _run(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Declared] | None,
    ) -> str:
        names: Mapping[str, Any] = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._token_text(self._tokenizer.bos),
            "eos_token": self._token_text(next(iter(self._tokenizer.eos), None)),
            "pad_token": self._token_text(self._tokenizer.pad),
            "tools": tools,
            "documents": None,
        }
        try:
            return self._program.render(names)
        except TemplateRaised as refusal:
            raise InputError(f"the chat template refuses: {refusal}", field="messages") from None
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception as problem:  # a template of a stranger may fail in any way
            raise TokenizerError(
                f"failed: {type(problem).__name__}: {problem}"[:500], file=self.file, remedy=REMEDY
            ) from None

    def _token_text(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.id_to_piece(token)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InputError naming the message whose role or text cannot be used."""
    if len(messages) > MAX_MESSAGES:
        raise InputError(f"are {len(messages)}, at most {MAX_MESSAGES} allowed", field="messages")
    invalid = [i for i, message in enumerate(messages) if not ROLE.fullmatch(message.role)]
    if invalid:
        roles = ", ".join(f"{messages[index].role!r:.40}" for index in invalid[:10])
        raise InputError(
            f"unknown role {roles}", field=f"messages.{invalid[0]}.role",
            remedy=_role_suggestion(messages[invalid[0]].role) or "use system, user or assistant",
        )  # fmt: skip
    for message in messages:
        check_text(message.content)


def _role_suggestion(role: str) -> str | None:
    """Return the question whether a similar role was meant, or None if none is similar."""
    matches = get_close_matches(role.strip().lower(), ROLES, 1, 0.75)
    return f"did you mean {matches[0]!r}?" if matches else None


# Marks are characters of a 32-character private-use block that no message contains: 16 digits, then
# these four. Private-use characters are unchanged by case, trim and escapes.
_OPEN, _MIDDLE, _CLOSE, _BREAK = 16, 17, 18, 19


def _map_strings(value: Any, text: Callable[[str], str]) -> Any:
    """Return a JSON value with `text` applied to all its strings, keys included."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {text(key): _map_strings(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, text) for item in value]
    return value


def _free_marks(texts: Iterable[str]) -> str:
    used = {ord(c) >> 5 for text in texts for c in text if ord(c) >= 0xF0000}
    for block in range(0xF0000 >> 5, 0xFFFC0 >> 5):
        if block not in used:
            return "".join(chr((block << 5) + i) for i in range(32))
    raise InputError("contain every private-use character of Unicode", field="messages")


def _mark(marks: str, index: int, content: str, trim: bool) -> str:
    content = content.strip() if trim else content
    if not content:  # templates test whether there is text at all
        return content
    digits = "".join(marks[int(digit, 16)] for digit in f"{index:x}")
    return f"{marks[_OPEN]}{digits}{marks[_MIDDLE]}{content}{marks[_CLOSE]}"


def _pattern(marks: str) -> re.Pattern[str]:
    opening, middle, closing = (re.escape(marks[i]) for i in (_OPEN, _MIDDLE, _CLOSE))
    digits = f"[{marks[0]}-{marks[15]}]+"
    return re.compile(f"{opening}({digits}){middle}([^{opening}{closing}]*){closing}")


def _without(marks: str, text: str) -> str:
    return _pattern(marks).sub(lambda match: match[2], text).replace(marks[_BREAK], "")


def _split_marked(
    marks: str, text: str, messages: Sequence[Message], gap: str
) -> list[Segment] | None:
    """Return the segments of a marked rendering, or None if a mark was lost or altered.

    `gap` is left out before answers whose tokens are known: see `ChatTemplate.gap`.
    """
    segments: list[Segment] = []
    at = 0
    for match in _pattern(marks).finditer(text):
        index = int("".join(f"{marks.index(digit):x}" for digit in match[1]), 16)
        if index >= len(messages) or messages[index].content.strip() != match[2].strip():
            return None
        known, before = messages[index].tokens, text[at : match.start()]
        if known is not None:
            before = before.removesuffix(gap)
        segments += [Segment(before, trusted=True), Segment(match[2], tokens=known)]
        at = match.end()
    segments.append(Segment(text[at:], trusted=True))
    delimiters = marks.replace(marks[_BREAK], "")
    if any(mark in segment.text for segment in segments for mark in delimiters):
        return None
    return segments
