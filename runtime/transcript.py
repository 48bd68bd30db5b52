"""The transcript of a chat, its JSON in a saved state, and the record of a session.

Each is an immutable value that is replaced as a whole, so that no update is partial.

A state of constant size can hold an endless conversation, but a transcript cannot. So old turns
that the state has read are left out of the rendered prompt, and later forgotten. This bounds both
what is kept of a conversation and the cost of a turn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edge.bundle.strict_json import loads
from edge.errors import EdgeError, InputError, StateError
from edge.runtime import statefile
from edge.runtime.context import Consumed, Context, ContextMark
from edge.runtime.sampling import restore_rng
from edge.text.template import MAX_MESSAGES, Message, check_messages
from edge.text.tokenizer import Tokenizer, check_text
from edge.text.tools import ToolCall

if TYPE_CHECKING:
    from edge.runtime.prompts import Turn

VERSION = 1
_TOOL_KEYS = {"tool_calls", "tool_call_id"}
KEPT = 1 << 20  # characters of a transcript above which messages left out of prompts are dropped


@dataclass(frozen=True)
class Conversation:
    """A chat, as far as it is kept.

    Attributes:
        messages: the transcript, including the system message.
        skipped: number of messages after the system message that prompts leave out. The state has
            read them.
    """

    messages: tuple[Message, ...] = ()
    skipped: int = 0

    @property
    def _first(self) -> int:
        """Index of the first message after the system message."""
        return int(bool(self.messages) and self.messages[0].role == "system")

    @property
    def shown(self) -> tuple[Message, ...]:
        """The messages that prompts contain."""
        return self.messages[: self._first] + self.messages[self._first + self.skipped :]

    @property
    def unanswered(self) -> bool:
        """Whether there are no messages besides the system message."""
        return len(self.messages) == self._first

    def continues(self, other: Conversation) -> bool:
        """Return whether the transcript begins with all messages of `other`."""
        return self.messages[: len(other.messages)] == other.messages

    def asked(self, text: str | Sequence[Message | Mapping[str, Any]]) -> Conversation:
        """Return the conversation with a user's text added, or replaced by a list of messages.

        Where the list repeats the transcript, answers keep the tokens they were generated as.
        Raises InputError naming an invalid message.
        """
        if isinstance(text, str):
            return Conversation((*self.messages, Message("user", text)), self.skipped)
        if isinstance(text, bytes | Mapping) or not isinstance(text, Iterable):
            raise InputError(
                f"must be a text or a list of messages, not {type(text).__name__}",
                field="messages", remedy='"Hello", or [{"role": "user", "content": "Hello"}]',
            )  # fmt: skip
        messages: list[Message] = []
        known = 0  # messages that repeat the transcript
        for index, item in enumerate(text):
            message = item if isinstance(item, Message) else _parse_message(index, item)
            if known == index < len(self.messages):
                existing = self.messages[index]
                if replace(existing, tokens=None) == replace(message, tokens=None):
                    message, known = existing, known + 1
            messages.append(message)
        if not messages or messages[-1].role == "assistant":
            raise InputError("must end with a message to answer", field="messages")
        check_messages(messages)
        return Conversation(tuple(messages), self.skipped if known == len(self.messages) else 0)

    def answered(self, answer: Message) -> Conversation:
        """Return the conversation with an answer added, without the oldest messages if too long."""
        messages, first = [*self.messages, answer], self._first
        excess = sum(len(message.content) for message in messages) - KEPT
        drop = 0
        while drop < self.skipped and (excess > 0 or len(messages) - drop > MAX_MESSAGES):
            excess -= len(messages[first + drop].content)
            drop += 1
        return Conversation((*messages[:first], *messages[first + drop :]), self.skipped - drop)

    def halved(self) -> Conversation | None:
        """Return the conversation without the older half of the shown messages.

        The last two turns are kept, because the state may lack the end of the latest answer.
        Returns None if there are no other turns.
        """
        shown = self.shown[self._first :]
        turns = [index for index, message in enumerate(shown) if message.role == "user"][:-1]
        sizes = [len(message.tokens or message.content) for message in shown]
        half = next((index for index in turns if 2 * sum(sizes[index:]) <= sum(sizes)), None)
        skip = turns[-1] if half is None and turns else half
        return Conversation(self.messages, self.skipped + skip) if skip else None


@dataclass(frozen=True)
class SavedSession:
    """The data saved beside a state."""

    conversation: Conversation
    consumed: Consumed
    rng: Mapping[str, Any]


def _parse_message(index: int, item: Mapping[str, Any]) -> Message:
    keys = {"role", "content"}
    if not isinstance(item, Mapping) or not keys <= set(item) <= keys | _TOOL_KEYS:
        raise InputError(
            f"must have role and content, and may have {' and '.join(sorted(_TOOL_KEYS))}, no more",
            field=f"messages.{index}",
        )
    if not isinstance(item["role"], str) or not isinstance(item["content"], str):
        raise InputError("role and content must be strings", field=f"messages.{index}")
    return _with_calls(Message(item["role"], item["content"]), item, f"messages.{index}")


def _with_calls(message: Message, item: Mapping[str, Any], field: str) -> Message:
    """Return the message with the tool calls and the call id in its JSON."""
    try:
        calls = tuple(map(read_call, item.get("tool_calls") or ()))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise InputError(
            "must be a list of calls, each with an id and a function: a name, and arguments as a "
            "JSON object",
            field=f"{field}.tool_calls",
        ) from None
    call_id = item.get("tool_call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise InputError("must be a string", field=f"{field}.tool_call_id")
    return replace(message, tool_calls=calls, tool_call_id=call_id)


def read_call(item: Mapping[str, Any]) -> ToolCall:
    """Parse a call in the OpenAI API's form. Raises KeyError, TypeError, ValueError."""
    function = item["function"]
    arguments = function["arguments"]
    source = arguments if isinstance(arguments, str) else json.dumps(arguments)
    if not isinstance(loads(source.encode()), dict):
        raise TypeError("no object")
    if not isinstance(item.get("id", ""), str) or not isinstance(function["name"], str):
        raise TypeError("no text")
    check_text(function["name"])
    return ToolCall(item.get("id", ""), function["name"], source)


def _call_to_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": call.source}}


def to_json(saved: SavedSession, model: str) -> dict[str, Any]:
    """Return a session as plain JSON. `model`: display name of the model."""
    return {
        "session": VERSION,
        "model": model,
        "messages": [
            {
                "role": message.role,
                "content": message.content,
                "tokens": None if message.tokens is None else list(message.tokens),
                **(
                    {"tool_calls": [*map(_call_to_json, calls)]}
                    if (calls := message.tool_calls)
                    else {}
                ),
                **({"tool_call_id": call_id} if (call_id := message.tool_call_id) else {}),
            }
            for message in saved.conversation.messages
        ],
        "skipped": saved.conversation.skipped,
        "tokens": list(saved.consumed.tokens),
        "forgotten": saved.consumed.forgotten,
        "gap": saved.consumed.gap,
        "pending": saved.consumed.pending,
        "rng": dict(saved.rng),
    }


def conversation_from_json(
    extra: Mapping[str, Any], tokenizer: Tokenizer | None, path: str | os.PathLike[str]
) -> Conversation:
    """Read and check the chat that `to_json` wrote; without a tokenizer, tokens are dropped.

    Raises StateError if it is malformed.
    """
    if extra.get("session") != VERSION:
        raise StateError(
            f"holds session version {extra.get('session')!r}, this runtime reads {VERSION}",
            file=path,
            remedy="save it again with this version",
        )
    with _malformed(path):
        messages: list[Message] = []
        for item in extra["messages"]:
            saved_tokens = item["tokens"]
            tokens = (
                None
                if saved_tokens is None or tokenizer is None
                else _check_ids(saved_tokens, tokenizer)
            )
            message = Message(item["role"], item["content"], tokens)
            messages.append(_with_calls(message, item, "extra"))
        check_messages(messages)
        # earlier versions kept everything
        return Conversation(tuple(messages), _check_count(extra.get("skipped", 0), len(messages)))


def from_json(
    extra: Mapping[str, Any], tokenizer: Tokenizer, path: str | os.PathLike[str]
) -> SavedSession:
    """Read and check what `to_json` wrote. Raises StateError if it is malformed."""
    conversation = conversation_from_json(extra, tokenizer, path)
    with _malformed(path):
        pending, tokens = extra["pending"], _check_ids(extra["tokens"], tokenizer)
        return SavedSession(
            conversation,
            Consumed(
                tokens,
                pending=None if pending is None else _check_ids([pending], tokenizer)[0],
                forgotten=_check_count(extra.get("forgotten", 0), 1 << 62),
                gap=_check_count(extra.get("gap", 0), len(tokens)),
            ),
            dict(extra["rng"]),
        )


def load_into(context: Context, path: str | os.PathLike[str], tokenizer: Tokenizer) -> SavedSession:
    """Load a file's state into a context and return the data saved with it. Raises StateError."""
    saved = from_json(context.state.load(path), tokenizer, path)
    context.consumed = saved.consumed
    if context.position != context.state.position:
        raise StateError("transcript and state disagree", file=path)
    restore_rng(saved.rng)  # raises if malformed
    return saved


def read_conversation(path: str | os.PathLike[str]) -> Conversation | None:
    """Return the chat in a file, even if its state cannot be used; None if there is none."""
    try:
        conversation = conversation_from_json(statefile.read_extra(path), None, path)
    except StateError:
        return None
    return conversation if conversation.messages else None


@contextmanager
def _malformed(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, EdgeError) as problem:
        raise StateError(f"has a malformed transcript: {problem}", file=path) from None


def _check_count(value: Any, maximum: int) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise ValueError(f"{value!r:.40} is not a number from 0 to {maximum}")
    return value


def _check_ids(values: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise TypeError("a token id is not a whole number")
    return tuple(tokenizer.check_id(value) for value in values)


@dataclass(frozen=True)
class SessionSnapshot:
    """A whole session at one moment. Holds a copy of one state."""

    context: ContextMark
    conversation: Conversation
    rng: Mapping[str, Any]

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.conversation.messages


@dataclass(frozen=True)
class SessionRecord:
    """What a session is besides its context.

    Attributes:
        conversation: the transcript.
        rng: state of the random numbers for answers without a seed of their own.
        undo: snapshots that `undo` returns to, the latest last.
        last: the turn that `regenerate` answers again.
        mark: point that the context must return to first; set while an action is in progress that
            an interrupt would leave incomplete.
    """

    conversation: Conversation
    rng: Mapping[str, Any]
    undo: tuple[SessionSnapshot, ...] = ()
    last: Turn | None = None
    mark: ContextMark | None = None
