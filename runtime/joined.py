"""An engine shared by several threads, each with its own conversation, that batches their steps.

A thread that wants a step waits for the others that took part in the last one, at most as long as
that step took. The last to arrive runs the step for all. Longer runs (prefill and drafts) go one by
one in order of arrival, and never two in a row while a step is waiting. Prefill runs in short
chunks, so a step waits for one chunk at most.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge.errors import EdgeError, EngineError
from edge.runtime.engine import Engine, JointStep, Rows, Stepped, WrappedEngine
from edge.runtime.state import State

CHUNK = 64  # maximum prefill tokens that other threads' steps wait for
T = TypeVar("T")


class _Asked:
    """A step that a thread waits for, and its result."""

    def __init__(self, step: JointStep) -> None:
        self.step = step
        self.position = step.state.position
        self.found: Stepped | None = None


class JoinedEngine(WrappedEngine):
    """See `Engine` and the module.

    A state belongs to one thread at a time. Its results do not depend on the other states. If the
    wrapped engine cannot join steps, they run in turn.

    Attributes:
        engine: the shared engine.
        chunk: maximum number of tokens in a committing run, at most `CHUNK`.
        size: number of states in the last step.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.chunk = min(engine.chunk, CHUNK)
        self.size = 0
        self._most = engine.most_joined
        self._changed = threading.Condition()
        self._steps: deque[_Asked] = deque()
        self._alone: deque[object] = deque()  # threads waiting for an exclusive run, in order
        self._turn: object = None  # holder of the run in progress
        self._stepped = True  # whether a step ran since the last exclusive run
        self._due: set[int] = set()  # states of the last step that have made no new request
        self._until = 0.0  # time at which waiting for them ends

    def run(
        self,
        tokens: NDArray[np.int64],
        state: State,
        *,
        parents: Sequence[int] | None = None,
        rows: Rows = "last",
        commit: bool = False,
    ) -> NDArray[np.float32]:
        single = np.shape(tokens) == (1, 1) and parents is None and not commit
        if self._most > 1 and single and isinstance(rows, str):
            found = self._step(JointStep(int(np.asarray(tokens)[0, 0]), state))
            assert isinstance(found, np.ndarray)
            return found[None, None]
        return self.in_turn(
            state, lambda: self.engine.run(tokens, state, parents=parents, rows=rows, commit=commit)
        )

    def run_greedy(self, tokens: NDArray[np.int64], state: State) -> NDArray[np.int64]:
        if self._most > 1 and np.shape(tokens) == (1, 1):
            found = self._step(JointStep(int(np.asarray(tokens)[0, 0]), state, greedy=True))
            return np.asarray([found], np.int64)
        return self.in_turn(state, lambda: self.engine.run_greedy(tokens, state))

    def leave(self, state: State) -> None:
        """Stop other threads from waiting for the next step of this state."""
        with self._changed:
            self._due.discard(id(state))
            if not self._due:
                self._changed.notify_all()

    def in_turn(self, state: State, work: Callable[[], T]) -> T:
        """Run `work` on a state exclusively, on this engine or another one on the same device.

        Waiting steps run before the next exclusive run.
        """
        mine = object()
        try:
            with self._changed:
                self._due.discard(id(state))
                self._alone.append(mine)
                while not self._may_run_alone(mine):
                    self._changed.wait()
                self._turn, self._stepped = mine, False
            return work()
        finally:
            self._leave_queue(self._alone, mine)

    def _may_run_alone(self, mine: object) -> bool:
        first = self._alone[0] is mine and self._turn is None
        return first and (self._stepped or not self._steps)

    def _may_step(self) -> bool:
        if self._turn is not None or (self._alone and self._stepped):
            return False
        return not self._due or len(self._steps) >= self._most or time.monotonic() >= self._until

    def _leave_queue(self, queue: deque[Any], mine: object) -> None:
        """Leave the queue and end the turn, also after an interrupt before or during the turn."""
        with self._changed:
            if mine in queue:
                queue.remove(mine)
            if self._turn is mine:
                self._turn = None
            self._changed.notify_all()

    def _step(self, step: JointStep) -> Stepped:
        mine = _Asked(step)
        try:
            with self._changed:
                self._due.discard(id(step.state))
                self._steps.append(mine)
            while mine.found is None:
                self._wait_or_lead(mine)
        finally:
            if mine.found is None:
                self._give_up(mine)
        if isinstance(mine.found, EdgeError):
            raise mine.found
        return mine.found

    def _give_up(self, mine: _Asked) -> None:
        """Withdraw a step after an interrupt.

        While another thread runs the step, the state belongs to that thread, so wait for it.
        """
        with self._changed:
            while mine.found is None and mine not in self._steps and self._turn not in (None, mine):
                self._changed.wait()
        self._leave_queue(self._steps, mine)

    def _wait_or_lead(self, mine: _Asked) -> None:
        members: list[_Asked] = []
        found: Sequence[Stepped] = ()
        began = 0.0
        try:
            with self._changed:
                while mine.found is None and not self._may_step():
                    left = self._until - time.monotonic()
                    self._changed.wait(left if self._due and left > 0 else None)
                if mine.found is not None:
                    return
                self._turn = mine
                members += islice(self._steps, self._most)
                for _ in members:
                    self._steps.popleft()
            began = time.monotonic()
            found = self._made([asked.step for asked in members])
        except EdgeError as problem:
            found = [problem] * len(members)
        finally:
            if members:
                self._tell(members, found or self._interrupted(mine, members), began)

    def _interrupted(self, mine: _Asked, members: Sequence[_Asked]) -> list[Stepped | None]:
        """Rewind all members; the others' steps run again, because the interrupt was not theirs."""
        found: list[Stepped | None] = []
        for asked in members:
            found.append(EngineError("the step was interrupted") if asked is mine else None)
            try:
                asked.step.state.rewind(asked.step.state.position - asked.position)
            except EdgeError as problem:
                found[-1] = problem
        return found

    def _tell(
        self, members: Sequence[_Asked], found: Sequence[Stepped | None], began: float
    ) -> None:
        with self._changed:
            again = [asked for asked, one in zip(members, found, strict=True) if one is None]
            self._steps = deque([*again, *(a for a in self._steps if a not in members)])
            for asked, one in zip(members, found, strict=True):
                asked.found = one
            self.size, self._stepped, self._turn = len(members), True, None
            self._due = {id(a.step.state) for a in members} - {id(a.step.state) for a in again}
            self._until = 2 * time.monotonic() - began
            self._changed.notify_all()

    def _made(self, steps: Sequence[JointStep]) -> Sequence[Stepped]:
        if len(steps) > 1:
            return self.engine.step_jointly(steps)
        # engines record and replay runs of one state
        step = steps[0]
        token = np.asarray([[step.token]], np.int64)
        if step.greedy:
            return [int(self.engine.run_greedy(token, step.state)[0])]
        logits: NDArray[np.float32] = self.engine.run(token, step.state)[0, 0]
        return [logits]
