"""What goes into a session: prompts as token ids, a chat as it grows, and both in a saved state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.errors import EdgeError, InputError, StateError
from edge.text.template import Message, check_messages
from edge.text.tokenizer import Tokenizer, check_text

VERSION = 1


class PromptReader:
    """Reads prompts for one tokenizer.

    Attributes:
        max_tokens: most tokens of one prompt.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens

    def encode(self, prompt: str | Sequence[int] | None) -> list[int]:
        """Token ids of a text, or those given. Raises InputError: no text, ids out of range."""
        tokenizer = self._tokenizer
        if prompt is None:
            return []
        if isinstance(prompt, str):
            check_text(prompt)
            self._check_text_size(len(prompt.encode()))
            return tokenizer.encode(prompt)
        self.check_length(len(prompt))
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise InputError(f"{token!r:.40} is not a token id", field="prompt")
            tokenizer.check_id(int(token))
        return [int(token) for token in prompt]

    def with_bos(self, tokens: list[int], text: bool) -> list[int]:
        """`tokens` as the beginning of a text: after the model's `bos`, where it wants one."""
        tokenizer = self._tokenizer
        if tokenizer.bos is None or not text:
            return tokens
        return [tokenizer.bos, *tokens] if tokenizer.add_bos or not tokens else tokens

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Raise InputError for messages that are no text, or too long whatever their tokens are."""
        for message in messages:
            check_text(message.content)
        self._check_text_size(sum(len(message.content.encode()) for message in messages))

    def _check_text_size(self, size: int) -> None:
        self.check_length(-(-size // self._tokenizer.longest_piece))

    def check_length(self, count: int) -> None:
        """Raise InputError for more tokens than allowed."""
        if count > self.max_tokens:
            raise InputError(
                f"has at least {count} tokens, at most {self.max_tokens} allowed",
                field="prompt",
                remedy="send less, or raise max_prompt_tokens",
            )


@dataclass(frozen=True)
class SavedSession:
    """What a saved state says beside the state."""

    messages: tuple[Message, ...]
    tokens: tuple[int, ...]
    pending: int | None
    rng: Mapping[str, Any]


def extended(
    messages: Sequence[Message], text: str | Sequence[Message | Mapping[str, str]]
) -> list[Message]:
    """The transcript with a user's text added, or the list given instead of it.

    Where the list repeats the transcript, answers keep the tokens they were generated as. Raises
    InputError naming the message that cannot be used.
    """
    if isinstance(text, str):
        return [*messages, Message("user", text)]
    out: list[Message] = []
    for index, item in enumerate(text):
        message = item if isinstance(item, Message) else _message(index, item)
        if len(out) == index < len(messages) and out == list(messages[:index]):
            own = messages[index]
            if (own.role, own.content) == (message.role, message.content):
                message = own
        out.append(message)
    if not out or out[-1].role == "assistant":
        raise InputError("must end with a message to answer", field="messages")
    check_messages(out)
    return out


def _message(index: int, item: Mapping[str, str]) -> Message:
    keys = {"role", "content"}
    if not isinstance(item, Mapping) or set(item) != keys:
        raise InputError("must have role and content, no more", field=f"messages.{index}")
    if not all(isinstance(value, str) for value in item.values()):
        raise InputError("role and content must be strings", field=f"messages.{index}")
    return Message(item["role"], item["content"])


def to_json(
    messages: Sequence[Message],
    tokens: Sequence[int],
    pending: int | None,
    rng: Mapping[str, Any],
    model: str,
) -> dict[str, Any]:
    """A session as plain JSON. `model`: its name, for people."""
    return {
        "session": VERSION,
        "model": model,
        "messages": [
            {
                "role": message.role,
                "content": message.content,
                "tokens": None if message.tokens is None else list(message.tokens),
            }
            for message in messages
        ],
        "tokens": list(tokens),
        "pending": pending,
        "rng": dict(rng),
    }


def from_json(
    extra: Mapping[str, Any], tokenizer: Tokenizer, path: str | os.PathLike[str]
) -> SavedSession:
    """What `to_json` wrote, checked. Raises StateError when it is something else."""
    if extra.get("session") != VERSION:
        raise StateError(
            f"holds session version {extra.get('session')!r}, this runtime reads {VERSION}",
            file=path,
            remedy="save it again with this version",
        )
    try:
        pending = extra["pending"]
        saved = SavedSession(
            messages=tuple(
                Message(
                    item["role"],
                    item["content"],
                    None if item["tokens"] is None else _ids(item["tokens"], tokenizer),
                )
                for item in extra["messages"]
            ),
            tokens=_ids(extra["tokens"], tokenizer),
            pending=None if pending is None else _ids([pending], tokenizer)[0],
            rng=dict(extra["rng"]),
        )
        check_messages(saved.messages)
    except (KeyError, TypeError, ValueError, EdgeError) as problem:
        raise StateError(f"has a malformed transcript: {problem}", file=path) from None
    return saved


def _ids(values: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise TypeError("a token id is not a whole number")
    return tuple(tokenizer.check_id(value) for value in values)
