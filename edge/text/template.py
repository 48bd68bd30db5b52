"""Chat templates: messages to a prompt in which typed text cannot forge a special token.

A template is rendered with every message's text between two private marks, which say afterwards
what came from the template (trusted: its special tokens count) and what was typed (plain). An
answer whose tokens are known stands in the prompt as those tokens, so that a conversation's state
is reused exactly.

A template that rewrites message text would lose the marks. Then text is trimmed beforehand, which
is what most such templates do; if that does not explain the difference either, special tokens that
were typed are broken up with a mark before rendering, and the special tokens of the outcome must be
those of a rendering of harmless text. Otherwise the conversation is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from edge.errors import InputError, TokenizerError
from edge.text.jinja import Program
from edge.text.jinja_values import TemplateRaised
from edge.text.tokenizer import Segment, Tokenizer, check_text

MAX_TEMPLATE = 256 << 10  # bytes
MAX_MESSAGES = 10_000
ROLE = re.compile(r"[a-z][a-z_]{0,31}")
REMEDY = "export the model with another chat template"


@dataclass(frozen=True)
class Message:
    """One turn. `tokens`: the ids an answer was generated as, when they are known."""

    role: str
    content: str
    tokens: tuple[int, ...] | None = None


class ChatTemplate:
    """A template that was read. Threads may share it."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, file: str = "chat template") -> None:
        """Raises TokenizerError: too large, a syntax error, or something templates may not use."""
        self.file = file
        self._tokenizer = tokenizer
        if len(source.encode("utf-8", errors="replace")) > MAX_TEMPLATE:
            raise TokenizerError(f"is larger than {MAX_TEMPLATE} bytes", file=file, remedy=REMEDY)
        try:
            self._program = Program(source)
        except (TemplateError, RecursionError, ValueError, OverflowError) as problem:
            line = getattr(problem, "lineno", None)
            where = f"line {line}: " if line else ""
            raise TokenizerError(
                f"cannot be compiled: {where}{problem}", file=file, remedy=REMEDY
            ) from None

    def render_text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The plain rendering, as transformers' `apply_chat_template(tokenize=False)` gives it."""
        return self._render([(m.role, m.content) for m in messages], add_generation_prompt)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[Segment]:
        """The prompt in segments, for `Tokenizer.encode_segments`.

        Raises InputError: roles or text that are refused, by us or by the template itself;
        TokenizerError: the template fails, exceeds its limits, or rewrites text beyond recognition.
        """
        check_messages(messages)
        plain = self.render_text(messages, add_generation_prompt=add_generation_prompt)
        marks = _free_marks(messages)
        for trim in (False, True):
            marked = self._render(
                [(m.role, _mark(marks, i, m.content, trim)) for i, m in enumerate(messages)],
                add_generation_prompt,
            )
            if _without(marks, marked) == plain:
                segments = _split_marked(marks, marked, messages, self.gap)
                if segments is not None:
                    return segments
        return self._render_broken(messages, marks[0], plain, add_generation_prompt)

    def encode(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of the prompt. A `bos` of the tokenizer comes first unless the template wrote it."""
        segments = self.render(messages, add_generation_prompt=add_generation_prompt)
        ids = self._tokenizer.encode_segments(segments)
        bos = self._tokenizer.bos
        if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    @cached_property
    def gap(self) -> str:
        """White space that earlier answers are written after and a new one is not.

        `Assistant: yes` follows a prompt that ends in `Assistant:` because the model writes the
        space itself: it is the first of the tokens that the answer is known as.
        """
        question, answer = ("user", "x"), ("assistant", "y")
        try:
            prompt = self._render([question], True)
            earlier = self._render([question, answer], False)
        except (InputError, TokenizerError):
            return ""  # the template wants another kind of conversation
        between = earlier.removeprefix(prompt).partition("y")[0]
        return between if earlier.startswith(prompt) and between.isspace() else ""

    def _render_broken(
        self, messages: Sequence[Message], mark: str, plain: str, add_generation_prompt: bool
    ) -> list[Segment]:
        spelled = [special.text for special in self._tokenizer.specials if len(special.text) > 1]

        def broken(text: str) -> str:
            for special in spelled:
                text = text.replace(special, special[0] + mark + special[1:])
            return text

        marked = self._render(
            [(m.role, broken(m.content)) for m in messages], add_generation_prompt
        )
        neutral = self._render(
            [(m.role, "x" if m.content else "") for m in messages], add_generation_prompt
        )
        find = self._tokenizer.find_specials
        if marked.replace(mark, "") != plain or find(marked) != find(neutral):
            raise TokenizerError(
                "rewrites messages, so that typed text cannot be told from special tokens",
                file=self.file,
                remedy=f"leave special tokens out of the messages, or {REMEDY}",
            )
        trusted = Segment(marked, trusted=True)
        # the marks have done their work: they only kept typed special tokens from being found
        return [
            Segment("", tokens=(part,))
            if isinstance(part, int)
            else Segment(part.replace(mark, ""))
            for part in self._tokenizer.split(trusted)
        ]

    def _render(self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool) -> str:
        names: Mapping[str, Any] = {
            "messages": [{"role": role, "content": content} for role, content in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._spelled(self._tokenizer.bos),
            "eos_token": self._spelled(next(iter(self._tokenizer.eos), None)),
            "pad_token": self._spelled(self._tokenizer.pad),
            "tools": None,
            "documents": None,
        }
        try:
            return self._program.render(names)
        except TemplateRaised as refusal:
            raise InputError(f"the chat template refuses: {refusal}", field="messages") from None
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception as problem:  # whatever a stranger's template does is its fault
            raise TokenizerError(
                f"failed: {type(problem).__name__}: {problem}"[:500], file=self.file, remedy=REMEDY
            ) from None

    def _spelled(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.id_to_piece(token)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InputError naming the message whose role or text cannot be used."""
    if len(messages) > MAX_MESSAGES:
        raise InputError(f"are {len(messages)}, at most {MAX_MESSAGES} allowed", field="messages")
    wrong = [i for i, message in enumerate(messages) if not ROLE.fullmatch(message.role)]
    if wrong:
        shown = ", ".join(f"{messages[index].role!r:.40}" for index in wrong[:10])
        raise InputError(
            f"unknown role {shown}", field=f"messages.{wrong[0]}.role",
            remedy="use system, user or assistant",
        )  # fmt: skip
    for message in messages:
        check_text(message.content)


# A mark is one of 32 characters of a private-use block that no message contains: 16 digits, an
# opening, a middle and a closing. Private-use characters are unchanged by case, trim and escapes.
_OPEN, _MIDDLE, _CLOSE = 16, 17, 18


def _free_marks(messages: Sequence[Message]) -> str:
    used = {ord(c) >> 5 for m in messages for c in m.content if ord(c) >= 0xF0000}
    for block in range(0xF0000 >> 5, 0xFFFC0 >> 5):
        if block not in used:
            return "".join(chr((block << 5) + i) for i in range(32))
    raise InputError("contain every private-use character of Unicode", field="messages")


def _mark(marks: str, index: int, content: str, trim: bool) -> str:
    content = content.strip() if trim else content
    if not content:  # templates ask whether there is text at all
        return content
    digits = "".join(marks[int(digit, 16)] for digit in f"{index:x}")
    return f"{marks[_OPEN]}{digits}{marks[_MIDDLE]}{content}{marks[_CLOSE]}"


def _pattern(marks: str) -> re.Pattern[str]:
    opening, middle, closing = (re.escape(marks[i]) for i in (_OPEN, _MIDDLE, _CLOSE))
    digits = f"[{marks[0]}-{marks[15]}]+"
    return re.compile(f"{opening}({digits}){middle}([^{opening}{closing}]*){closing}")


def _without(marks: str, text: str) -> str:
    return _pattern(marks).sub(lambda match: match[2], text)


def _split_marked(
    marks: str, text: str, messages: Sequence[Message], gap: str
) -> list[Segment] | None:
    """Segments of a marked rendering; None when a mark was lost or altered.

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
    if any(mark in segment.text for segment in segments for mark in marks):
        return None
    return segments
