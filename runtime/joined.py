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


class _PendingStep:
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
        self._max_joined = engine.most_joined
        self._changed = threading.Condition()
        self._steps: deque[_PendingStep] = deque()
        self._exclusive_queue: deque[object] = deque()  # threads waiting to run alone, in order
        self._turn: object = None  # holder of the run in progress
        self._stepped = True  # whether a step ran since the last exclusive run
        self._due: set[int] = set()  # states of the last step that have made no new request
        self._wait_until = 0.0  # time at which waiting for them ends

    @property
    def requests(self) -> int:
        """Number of steps and of exclusive runs that wait or run."""
        return len(self._steps) + len(self._exclusive_queue)

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
        if self._max_joined > 1 and single and isinstance(rows, str):
            logits = self._step(JointStep(int(np.asarray(tokens)[0, 0]), state))
            assert isinstance(logits, np.ndarray)
            return logits[None, None]
        return self.in_turn(
            state, lambda: self.engine.run(tokens, state, parents=parents, rows=rows, commit=commit)
        )

    def run_greedy(self, tokens: NDArray[np.int64], state: State) -> NDArray[np.int64]:
        if self._max_joined > 1 and np.shape(tokens) == (1, 1):
            token = self._step(JointStep(int(np.asarray(tokens)[0, 0]), state, greedy=True))
            return np.asarray([token], np.int64)
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
        ticket = object()
        try:
            with self._changed:
                self._due.discard(id(state))
                self._exclusive_queue.append(ticket)
                while not self._may_run_alone(ticket):
                    self._changed.wait()
                self._turn, self._stepped = ticket, False
            return work()
        finally:
            self._leave_queue(self._exclusive_queue, ticket)

    def _may_run_alone(self, ticket: object) -> bool:
        first = self._exclusive_queue[0] is ticket and self._turn is None
        return first and (self._stepped or not self._steps)

    def _may_step(self) -> bool:
        if self._turn is not None or (self._exclusive_queue and self._stepped):
            return False
        return (
            not self._due
            or len(self._steps) >= self._max_joined
            or time.monotonic() >= self._wait_until
        )

    def _leave_queue(self, queue: deque[Any], ticket: object) -> None:
        """Leave the queue and end the turn, also after an interrupt before or during the turn."""
        with self._changed:
            if ticket in queue:
                queue.remove(ticket)
            if self._turn is ticket:
                self._turn = None
            self._changed.notify_all()

    def _step(self, step: JointStep) -> Stepped:
        pending = _PendingStep(step)
        try:
            with self._changed:
                self._due.discard(id(step.state))
                self._steps.append(pending)
            while pending.found is None:
                self._wait_or_lead(pending)
        finally:
            if pending.found is None:
                self._withdraw(pending)
        if isinstance(pending.found, EdgeError):
            raise pending.found
        return pending.found

    def _withdraw(self, pending: _PendingStep) -> None:
        """Withdraw a step after an interrupt.

        While another thread runs the step, the state belongs to that thread, so wait for it.
        """
        with self._changed:
            while (
                pending.found is None
                and pending not in self._steps
                and self._turn not in (None, pending)
            ):
                self._changed.wait()
        self._leave_queue(self._steps, pending)

    def _wait_or_lead(self, pending: _PendingStep) -> None:
        members: list[_PendingStep] = []
        results: Sequence[Stepped] = ()
        started = 0.0
        try:
            with self._changed:
                while pending.found is None and not self._may_step():
                    remaining = self._wait_until - time.monotonic()
                    self._changed.wait(remaining if self._due and remaining > 0 else None)
                if pending.found is not None:
                    return
                self._turn = pending
                members += islice(self._steps, self._max_joined)
                for _ in members:
                    self._steps.popleft()
            started = time.monotonic()
            results = self._run_steps([member.step for member in members])
        except EdgeError as problem:
            results = [problem] * len(members)
        finally:
            if members:
                self._deliver(members, results or self._rewind_members(pending, members), started)

    def _rewind_members(
        self, pending: _PendingStep, members: Sequence[_PendingStep]
    ) -> list[Stepped | None]:
        """Rewind all members; the others' steps run again, because the interrupt was not theirs."""
        results: list[Stepped | None] = []
        for member in members:
            results.append(EngineError("the step was interrupted") if member is pending else None)
            try:
                member.step.state.rewind(member.step.state.position - member.position)
            except EdgeError as problem:
                results[-1] = problem
        return results

    def _deliver(
        self, members: Sequence[_PendingStep], results: Sequence[Stepped | None], started: float
    ) -> None:
        with self._changed:
            retried = [
                member for member, result in zip(members, results, strict=True) if result is None
            ]
            self._steps = deque([*retried, *(m for m in self._steps if m not in members)])
            for member, result in zip(members, results, strict=True):
                member.found = result
            self.size, self._stepped, self._turn = len(members), True, None
            self._due = {id(m.step.state) for m in members} - {id(m.step.state) for m in retried}
            self._wait_until = 2 * time.monotonic() - started
            self._changed.notify_all()

    def _run_steps(self, steps: Sequence[JointStep]) -> Sequence[Stepped]:
        if len(steps) > 1:
            return self.engine.step_jointly(steps)
        # engines record and replay runs of one state
        step = steps[0]
        token = np.asarray([[step.token]], np.int64)
        if step.greedy:
            return [int(self.engine.run_greedy(token, step.state)[0])]
        logits: NDArray[np.float32] = self.engine.run(token, step.state)[0, 0]
        return [logits]
