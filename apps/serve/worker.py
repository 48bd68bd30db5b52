"""The thread in which the model is loaded and runs, one request after the other."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edge.apps.serve.errors import ApiError, busy, internal, of_edge_error, stopping, too_late
from edge.apps.serve.requests import ParsedRequest
from edge.apps.serve.slot import Slot
from edge.apps.terminal import say, tell_traceback
from edge.errors import EdgeError
from edge.runtime.generate import Generation
from edge.runtime.model import Model
from edge.runtime.result import GenerationResult, TokenLogprob
from edge.text.tools import CallDelta


@dataclass(frozen=True)
class Piece:
    """Text that joins one of a request's answers, what was asked of the tokens it begins, and what
    joins its calls of tools.
    """

    text: str
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True)
class Ended:
    """All answers are complete. `reused`: tokens of the prompt that were not run again."""

    results: tuple[GenerationResult, ...]
    reused: int


Event = Piece | Ended | ApiError  # text, then how it ended


class Job:
    """One request to answer.

    Attributes:
        until: on the monotonic clock, when nobody wants it any more.
        begun: whether the model has started on it.
    """

    def __init__(self, asked: ParsedRequest, until: float, post: Callable[[Event], None]) -> None:
        """`post` is called in the worker's thread with every event."""
        self.asked = asked
        self.until = until
        self.post = post
        self.begun = False
        self.cancelled = threading.Event()
        self._generation: Generation | None = None

    def cancel(self) -> None:
        """End it within one step or chunk, or before it begins; from any thread, any time."""
        self.cancelled.set()
        generation = self._generation
        if generation is not None:
            generation.cancel()

    def attach(self, generation: Generation) -> None:
        """What `cancel` ends from now on."""
        self._generation = generation
        if self.cancelled.is_set():  # it came in between
            generation.cancel()


class ModelWorker:
    """Owns the model. `state` is `loading`, then `ready` or `failed`, at last `stopping`.

    Attributes:
        model: None until it is ready.
        capacity: most tokens its state holds, None without such a limit.
        problem: why loading failed.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Model, Slot]],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called in the worker's thread when loading has ended."""
        self.state = "loading"
        self.model: Model | None = None
        self.capacity: int | None = None
        self.problem: BaseException | None = None
        self._load = load
        self._changed = changed
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._wake = threading.Condition()
        self._typical_s = 1.0
        self._given_up = ""
        # a process that has to leave at once does not wait for it
        self._thread = threading.Thread(target=self._main, name="edge-model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check_ready(self) -> Model:
        """The model. Raises ApiError 503 while it loads, and when the server stops."""
        if self.state == "loading":
            raise busy("the model is being loaded", "model_loading", 2)
        if self.state == "stopping":
            raise stopping()
        if self.model is None:
            raise ApiError(503, "the model could not be loaded", code="model_failed")
        return self.model

    def submit(self, job: Job) -> None:
        """Queue a job. Raises ApiError 503 when the server takes none."""
        with self._wake:
            self.check_ready()
            self._jobs.append(job)
            self._wake.notify()

    def retry_s(self, ahead: int) -> int:
        """Seconds after which another request has a chance, with `ahead` before it."""
        return min(60, max(1, math.ceil(self._typical_s * ahead)))

    def drain(self) -> None:
        """Take no more jobs and refuse those that wait; the running answer goes on."""
        with self._wake:
            self.state = "stopping"
            waiting = list(self._jobs)
            self._jobs.clear()
            self._wake.notify()
        for job in waiting:
            job.post(stopping())

    def stop(self) -> None:
        """`drain`, and end the running answer, too."""
        self.drain()
        running = self._running
        if running is not None:
            running.cancel()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- in the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            model, slot = self._load()
        except BaseException as problem:  # whatever it was, the process has to hear of it
            self.problem = problem
            self.state = "failed"
            self._changed()
            return
        self.model, self.capacity = model, slot.capacity
        with self._wake:
            if self.state == "loading":
                self.state = "ready"
        self._changed()
        while (job := self._next()) is not None:
            began = time.monotonic()
            job.post(self._answered(job, slot))
            self._running = None
            self._typical_s += 0.2 * (time.monotonic() - began - self._typical_s)

    def _next(self) -> Job | None:
        with self._wake:
            while not self._jobs:
                if self.state == "stopping":
                    return None
                self._wake.wait()
            self._running = self._jobs.popleft()
            return self._running

    def _answered(self, job: Job, slot: Slot) -> Event:
        """Run a job; returns how it ended."""
        try:
            if job.cancelled.is_set() or time.monotonic() >= job.until:
                return too_late("the deadline passed before the request's turn came")
            job.begun = True
            results: list[GenerationResult] = []
            while len(results) < job.asked.count:
                generation = self._begin(job, slot, again=bool(results))
                job.attach(generation)
                self._run(generation, job, len(results))
                results.append(generation.result)
            return self._ended(results, slot)
        except EdgeError as problem:
            refusal = of_edge_error(problem)
            if refusal.status >= 500:
                tell_traceback()
            return refusal
        except Exception:  # the thread outlives every request
            tell_traceback()
            return internal()

    def _begin(self, job: Job, slot: Slot, *, again: bool) -> Generation:
        asked, left = job.asked, max(job.until - time.monotonic(), 1e-9)
        params = replace(asked.params, deadline_s=left)
        if again:
            return slot.again(params, continued=not asked.chat, tools=asked.tools)
        return slot.begin(
            asked.tokens, params,
            continued=not asked.chat, tools=asked.tools, more=asked.count > 1,
        )  # fmt: skip

    def _run(self, generation: Generation, job: Job, choice: int) -> None:
        told = 0
        for text in generation:
            found = generation.logprobs(told)
            told += len(found)
            job.post(Piece(text, choice, found, generation.call_deltas()))

    def _ended(self, results: Sequence[GenerationResult], slot: Slot) -> Event:
        last = results[-1]
        if last.finish_reason == "cancelled" and self.state == "stopping":
            return stopping()
        if last.finish_reason == "deadline" and not any(result.tokens for result in results):
            return too_late("the deadline passed before the prompt was read")
        self._tell_of(last)
        return Ended(tuple(results), slot.reused)

    def _tell_of(self, result: GenerationResult) -> None:
        """Log why drafting was given up, once for each reason; answers only say that it was."""
        drafted = result.speculation
        problem = drafted.problem if drafted else ""
        if drafted and problem and problem != self._given_up:
            say(f"{drafted.drafter} given up: {problem}", file=sys.stderr, flush=True)
        self._given_up = problem
