"""A lock that survives interrupts: one left behind is seen to be, and taken over."""

from __future__ import annotations

import sys
from threading import Lock, get_ident
from types import FrameType

from edge.errors import EngineError

_PATIENCE_S = 0.5  # after which a thread that waits looks whether the holder still runs


class _Ticket:
    """A place in the queue of a hold, taken by a function that runs."""

    __slots__ = ("depth", "frame", "gate", "thread")

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        self.thread = get_ident()
        self.depth = 0
        self.gate = Lock()
        self.gate.acquire()

    def left(self) -> bool:
        """Whether the function has ended, by an interrupt that kept it from giving this back."""
        try:
            self.frame.clear()
        except RuntimeError:  # so Python says that it runs
            return False
        return True


class Hold:
    """One thread at a time: another one is refused, or `waits`, and the one that has it may then
    take it again.

    Python raises KeyboardInterrupt between any two steps, also where a lock has been taken and the
    `with` block has not begun. So who holds it is known by the function that does: when that no
    longer runs, nobody does.
    """

    def __init__(self, refusal: str, remedy: str, *, waits: bool = False) -> None:
        self._queue: list[_Ticket] = []  # the first one holds it; lists change in one step
        self._refusal, self._remedy, self._waits = refusal, remedy, waits

    def __enter__(self) -> None:
        self.take(sys._getframe(1))

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, frame: FrameType) -> None:
        """Hold it until `release`, while the function `frame` runs, which is no generator's.

        Raises EngineError where it is held and does not wait.
        """
        ticket = _Ticket(frame)
        self._queue.append(ticket)
        while (first := self._queue[0]) is not ticket:
            if first.left():
                self._leave(first)
            elif not self._waits:
                self._leave(ticket)
                raise EngineError(self._refusal, remedy=self._remedy)
            elif first.thread == ticket.thread:
                self._leave(ticket)
                first.depth += 1
                return
            elif first.gate.acquire(timeout=_PATIENCE_S):
                first.gate.release()

    def release(self) -> None:
        first = self._queue[0]
        if first.depth:
            first.depth -= 1
        else:
            self._leave(first)

    def _leave(self, ticket: _Ticket) -> None:
        try:
            self._queue.remove(ticket)
        except ValueError:  # two threads saw the same one left: the other one has taken it away
            return
        ticket.gate.release()
