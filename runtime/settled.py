"""What a session holds between answers: one value, replaced whole, so that nothing is half done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge.runtime.generate import ContextMark, Logits
from edge.runtime.transcript import Talk
from edge.text.template import Message

if TYPE_CHECKING:
    from edge.runtime.constrain.tools import ToolUse


@dataclass(frozen=True)
class SessionSnapshot:
    """All of a session at one moment. Holds a copy of one state."""

    context: ContextMark
    talk: Talk
    rng: Mapping[str, Any]

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.talk.messages


@dataclass
class Turn:
    """A turn, kept for `regenerate`.

    Attributes:
        tokens: of the prompt.
        talk: what it answers, of a chat. tools: what that answer may call.
        anew: the transcript is another than the one that the state has read.
        cut: where tokens that the prompt leaves out lie in the context, and how many.
        read: where the prompt had been read and nothing of the answer, and the logits [V] there.
    """

    tokens: list[int]
    talk: Talk | None
    anew: bool = False
    cut: tuple[int, int] = (0, 0)
    tools: ToolUse | None = None
    read: tuple[ContextMark, Logits] | None = None


@dataclass(frozen=True)
class Settled:
    """A session, but for its context.

    Attributes:
        rng: of random numbers that answers without a seed of their own draw from.
        undo: what `undo` goes back to, the latest last.
        last: the turn that `regenerate` answers again.
        mark: where the context has to go back to before anything else: set while something is
            under way that an interrupt would leave half done.
    """

    talk: Talk
    rng: Mapping[str, Any]
    undo: tuple[SessionSnapshot, ...] = ()
    last: Turn | None = None
    mark: ContextMark | None = None
