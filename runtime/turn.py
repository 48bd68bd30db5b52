"""What a session remembers of a turn, and of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge.runtime.context import ContextMark, Logits
from edge.runtime.generate import Answer
from edge.text.template import Message


@dataclass(frozen=True)
class SessionSnapshot:
    """All of a session at one moment. Holds a copy of one state."""

    context: ContextMark
    messages: tuple[Message, ...]
    rng: Mapping[str, Any]


@dataclass(frozen=True)
class Prompted:
    """Where a turn's prompt had been read and nothing of its answer: what `regenerate` needs.

    Attributes:
        logits: [V], after the prompt.
        length: tokens of the prompt, those included that the state held before.
    """

    context: ContextMark
    logits: Logits
    length: int


@dataclass
class Turn:
    """A turn that has begun.

    Attributes:
        tokens: of the prompt.
        messages: the transcript it answers, of a chat.
        before: what to go back to when it leaves no trace.
        prompted: known from the start when it is answered again.
        again: whether it is.
    """

    tokens: list[int]
    messages: list[Message] | None
    before: SessionSnapshot | None = None
    prompted: Prompted | None = None
    again: bool = False
    answer: Answer = field(init=False)
