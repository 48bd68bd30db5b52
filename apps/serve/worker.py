"""The thread in which the model is loaded and runs, one request after the other."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from edge.apps.serve.errors import ApiError, busy, internal, of_edge_error, stopping, too_late
from edge.apps.serve.metrics import Metrics
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


@dataclass(frozen=True)
class Served:
    """A model that is loaded, and the states it runs in."""

    model: Model
    slot: Slot


class Job:
    """One request to answer.

    Attributes:
        until: on the monotonic clock, when nobody wants it any more.
        served: by which model; None is the one that was loaded last.
        client: whose it is.
        begun: whether the model has started on it.
    """

    def __init__(
        self,
        asked: ParsedRequest,
        until: float,
        post: Callable[[Event], None],
        served: Served | None = None,
        client: str = "",
    ) -> None:
        """`post` is called in the worker's thread with every event."""
        self.asked = asked
        self.until = until
        self.post = post
        self.served = served
        self.client = client
        self.came = time.monotonic()
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


@dataclass(frozen=True)
class _Wanted:
    """A model that a request asks for; `found` gets it when its turn has come."""

    name: str
    found: Future[Served]
    client: str


class ModelWorker:
    """Owns the model. `state` is `loading`, then `ready` or `failed`, at last `stopping`.

    One model is loaded at a time: another that is asked for takes its place. Clients take turns:
    who has many requests waiting does not keep others waiting for all of them.

    Attributes:
        name, served: the model, None until it is ready.
        problem: why loading failed.
        metrics: of the answers.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Model, Slot]],
        changed: Callable[[], None] = lambda: None,
        *,
        name: str = "",
        load_other: Callable[[str], tuple[Model, Slot]] | None = None,
    ) -> None:
        """`name`: of the model that `load` loads; `load_other`: loads one by another name.
        `changed` is called in the worker's thread when loading has ended.
        """
        self.state = "loading"
        self.name = self._first = name
        self.served: Served | None = None
        self.problem: BaseException | None = None
        self.metrics = Metrics()
        self._load = load
        self._load_other = load_other
        self._changed = changed
        self._jobs: list[Job | _Wanted] = []
        self._turns: dict[str, int] = {}  # of clients: when each had its last one
        self._running: Job | None = None
        self._wake = threading.Condition()
        self._typical_s = 1.0
        self._given_up = ""
        # a process that has to leave at once does not wait for it
        self._thread = threading.Thread(target=self._main, name="edge-model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check_ready(self) -> None:
        """Raise ApiError 503 while the first model loads, and when the server stops."""
        if self.state == "loading":
            raise busy("the model is being loaded", "model_loading", 2)
        if self.state == "stopping":
            raise stopping()
        if self.state == "failed":
            raise ApiError(503, "the model could not be loaded", code="model_failed")

    @property
    def waiting(self) -> int:
        """How many requests wait for the model."""
        return len(self._jobs)

    async def obtain(self, name: str, until: float, client: str = "") -> Served:
        """The model of this name, loaded in its turn. Raises ApiError, EdgeError."""
        self.check_ready()
        if name == self.name and self.served is not None:
            return self.served
        wanted = _Wanted(name, Future(), client)
        self.submit(wanted)
        try:
            left = max(0.0, until - time.monotonic())
            return await asyncio.wait_for(asyncio.wrap_future(wanted.found), left)
        except asyncio.TimeoutError:
            raise too_late("the deadline passed before the model was loaded") from None

    def submit(self, job: Job | _Wanted) -> None:
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
            if isinstance(job, Job):
                job.post(stopping())
            else:
                job.found.set_exception(stopping())

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
            self.served = Served(*self._load())
        except BaseException as problem:  # whatever it was, the process has to hear of it
            self.problem = problem
            self.state = "failed"
            self._changed()
            return
        with self._wake:
            if self.state == "loading":
                self.state = "ready"
        self._changed()
        while (job := self._next()) is not None:
            if isinstance(job, _Wanted):
                self._change(job)
                continue
            began = time.monotonic()
            job.post(self._answered(job))
            self._running = None
            self._typical_s += 0.2 * (time.monotonic() - began - self._typical_s)

    def _change(self, wanted: _Wanted) -> None:
        """Load another model in the place of this one, or the first one again."""
        if not wanted.found.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        try:
            if wanted.name != self.name or self.served is None:
                # memory of the one before goes with the last request that it answers
                self.name, self.served = wanted.name, None
                if wanted.name == self._first:
                    self.served = Served(*self._load())
                elif self._load_other is not None:
                    self.served = Served(*self._load_other(wanted.name))
            assert self.served is not None
            wanted.found.set_result(self.served)
        except BaseException as problem:
            self.name = ""
            wanted.found.set_exception(problem)

    def _next(self) -> Job | _Wanted | None:
        with self._wake:
            while not self._jobs:
                if self.state == "stopping":
                    return None
                self._wake.wait()
            job = min(self._jobs, key=lambda one: self._turns.get(one.client, 0))
            self._jobs.remove(job)
            self._turns[job.client] = 1 + max(self._turns.values(), default=0)
            if not self._jobs:
                self._turns = {job.client: 1}
            self._running = job if isinstance(job, Job) else None
            return job

    def _answered(self, job: Job) -> Event:
        """Run a job; returns how it ended."""
        try:
            if job.cancelled.is_set() or time.monotonic() >= job.until:
                return too_late("the deadline passed before the request's turn came")
            job.begun = True
            served = job.served or self.served
            assert served is not None
            slot, waited = served.slot, time.monotonic() - job.came
            results: list[GenerationResult] = []
            while len(results) < job.asked.count:
                generation = self._begin(job, slot, again=bool(results))
                job.attach(generation)
                self._run(generation, job, len(results))
                results.append(generation.result)
            self.metrics.answered(len(job.asked.tokens), slot.reused, waited, results)
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
