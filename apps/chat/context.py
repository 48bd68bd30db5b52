"""The context of a conversation: how full it is, and how to make room in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge.apps.units import megabytes
from edge.text.template import Message

if TYPE_CHECKING:
    from edge.runtime.session import Session

POLICIES = ("drop", "stop")
NOTICED = 0.8  # share of the context from which on notices say how full it is


def described(session: Session) -> str:
    """Describe the state: the constant part, and the KV caches that hold the context."""
    constant = f"{megabytes(session.constant_bytes)} whatever the length"
    if session.capacity is None:
        return f"state {constant}"
    caches = megabytes(session.state_bytes - session.constant_bytes)
    growing = f"{caches} for a context of {session.capacity} tokens"
    return f"state {constant}, and {growing}" if session.constant_bytes else f"state {growing}"


def notice(session: Session) -> str | None:
    """Say how full the context is, once it is nearly full."""
    used, capacity = session.position, session.capacity
    if capacity is None or used < NOTICED * capacity:
        return None
    return f"the context is {used / capacity:.0%} full: {used} of {capacity} tokens"


def with_room(session: Session, text: str, answer: int) -> tuple[list[Message], int]:
    """Return the conversation with one more message, and how many of its oldest were left out.

    The prompt must fit beside `answer` tokens, a quarter of the context at most. The system message
    stays.
    """
    template, capacity = session.model.template, session.capacity
    messages = [*session.messages, Message("user", text)]
    if template is None or capacity is None:
        return messages, 0
    room = capacity - min(answer, capacity // 4)
    first = int(messages[0].role == "system")
    dropped = 0
    while len(template.encode(messages)) > room:
        later = range(first + 1, len(messages))
        turn = next((index for index in later if messages[index].role == "user"), None)
        if turn is None:
            break
        del messages[first:turn]
        dropped += turn - first
    return messages, dropped
