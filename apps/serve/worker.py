"""The threads in which the model is loaded and runs, with one request in each."""

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
from edge.apps.serve.jobs import Embedded, Ended, Event, Job, Piece, Served
from edge.apps.serve.metrics import Metrics
from edge.apps.serve.requests import EmbeddingRequest, ParsedRequest
from edge.apps.serve.slot import Slot
from edge.apps.serve.slots import SlotPool
from edge.apps.terminal import say, tell_traceback
from edge.errors import EdgeError
from edge.runtime.embed import Vectors
from edge.runtime.generate import Generation
from edge.runtime.model import Model
from edge.runtime.result import GenerationResult

Load = Callable[[], tuple[Model, Sequence[Slot]]]


@dataclass(frozen=True)
class _ModelRequest:
    """A model that a request asks for; `found` receives it when its turn has come."""

    name: str
    found: Future[Served]
    client: str


class ModelWorker:
    """Owner of the model. `state` is `loading`, then `ready` or `failed`, finally `stopping`.

    One request runs in each of the model's slots. One model is loaded at a time: another that is
    requested replaces it, once nothing runs. Clients take turns, so a client with many waiting
    requests does not make others wait for all of them.

    Attributes:
        name, served: the model; `served` is None until it is ready.
        problem: why loading failed.
        metrics: metrics of the answers.
    """

    def __init__(
        self,
        load: Load,
        changed: Callable[[], None] = lambda: None,
        *,
        name: str = "",
        load_other: Callable[[str], tuple[Model, Sequence[Slot]]] | None = None,
    ) -> None:
        """`name`: name of the model that `load` loads. `load_other`: loads another one by name.
        `changed`: called in the worker's thread when loading has ended.
        """
        self.state = "loading"
        self.name = self._first = name
        self.served: Served | None = None
        self.problem: BaseException | None = None
        self.metrics = Metrics()
        self._load = load
        self._load_other = load_other
        self._changed = changed
        self._jobs: list[Job | _ModelRequest] = []
        self._turns: dict[str, int] = {}  # client → number of its last turn
        self._running: set[Job | _ModelRequest] = set()
        self._wake = threading.Condition()
        self._average_s = 1.0
        self._given_up = ""
        # a daemon, so that a process that must exit at once does not wait for it
        self._threads = [threading.Thread(target=self._main, name="edge-model", daemon=True)]

    def start(self) -> None:
        self._threads[0].start()

    def check_ready(self) -> None:
        """Raise ApiError 503 while the first model loads, if it failed to, or on shutdown."""
        if self.state == "loading":
            raise busy("the model is being loaded", "model_loading", 2)
        if self.state == "stopping":
            raise stopping()
        if self.state == "failed":
            raise ApiError(503, "the model could not be loaded", code="model_failed")

    @property
    def parallel(self) -> int:
        """Maximum number of requests that are answered at once."""
        served = self.served
        return 1 if served is None else len(served.slots.slots)

    @property
    def running(self) -> int:
        """Number of requests that are being answered."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the model."""
        return len(self._jobs)

    async def obtain(self, name: str, until: float, client: str = "") -> Served:
        """Return the model of this name, loaded in its turn. Raises ApiError or EdgeError."""
        self.check_ready()
        if name == self.name and self.served is not None:
            return self.served
        request = _ModelRequest(name, Future(), client)
        self.submit(request)
        try:
            remaining_s = max(0.0, until - time.monotonic())
            return await asyncio.wait_for(asyncio.wrap_future(request.found), remaining_s)
        except asyncio.TimeoutError:
            raise too_late("the deadline passed before the model was loaded") from None

    def submit(self, job: Job | _ModelRequest) -> None:
        """Queue a job. Raises ApiError 503 when the server accepts none."""
        with self._wake:
            self.check_ready()
            self._jobs.append(job)
            self._wake.notify_all()

    def retry_s(self, ahead: int) -> int:
        """Return the seconds after which to retry, with `ahead` requests in front."""
        return min(60, max(1, math.ceil(self._average_s * ahead / self.parallel)))

    def drain(self) -> None:
        """Accept no more jobs and refuse those that wait; running answers continue."""
        with self._wake:
            self.state = "stopping"
            waiting = list(self._jobs)
            self._jobs.clear()
            self._wake.notify_all()
        for job in waiting:
            if isinstance(job, Job):
                job.post(stopping())
            else:
                job.found.set_exception(stopping())

    def stop(self) -> None:
        """Call `drain`, and end the running answers too."""
        self.drain()
        with self._wake:
            running = [job for job in self._running if isinstance(job, Job)]
        for job in running:
            job.cancel()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads; return whether they have ended."""
        until = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _main(self) -> None:
        try:
            self._serve(self._load())
        except BaseException as problem:  # whatever it is, the process must learn of it
            self.problem = problem
            self.state = "failed"
            self._changed()
            return
        with self._wake:
            if self.state == "loading":
                self.state = "ready"
        self._changed()
        self._run_jobs()

    def _serve(self, loaded: tuple[Model, Sequence[Slot]]) -> None:
        """Serve this model from now on, with a thread for each slot."""
        model, slots = loaded
        self.served = Served(model, SlotPool(slots))
        while len(self._threads) < len(slots):
            name = f"edge-model-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run_jobs, name=name, daemon=True))
            self._threads[-1].start()

    def _run_jobs(self) -> None:
        while (turn := self._next_job()) is not None:
            job, slot = turn
            if isinstance(job, _ModelRequest):
                self._change_model(job)
                self._finish(job)
                continue
            started = time.monotonic()
            event = self._answer(job, slot)
            self._finish(job, slot, time.monotonic() - started)
            job.post(event)

    def _finish(
        self, job: Job | _ModelRequest, slot: Slot | None = None, took_s: float = 0.0
    ) -> None:
        with self._wake:
            self._running.discard(job)
            if slot is not None and (pool := self._pool(job)) is not None:
                pool.give(slot)
                self._average_s += 0.2 * (took_s - self._average_s)
            self._wake.notify_all()

    def _pool(self, job: Job | _ModelRequest) -> SlotPool | None:
        """Return the slots of the model that a job is for; None if it could not be loaded."""
        served = (job.served if isinstance(job, Job) else None) or self.served
        return None if served is None else served.slots

    def _change_model(self, request: _ModelRequest) -> None:
        """Replace the model by another one, or by the first one again."""
        if not request.found.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        try:
            if request.name != self.name or self.served is None:
                # the memory of the old model is freed with the last request that it answers
                self.name, self.served = request.name, None
                if request.name == self._first:
                    self._serve(self._load())
                elif self._load_other is not None:
                    self._serve(self._load_other(request.name))
            assert self.served is not None
            request.found.set_result(self.served)
        except BaseException as problem:
            self.name = ""
            request.found.set_exception(problem)

    def _next_job(self) -> tuple[Job | _ModelRequest, Slot | None] | None:
        """Wait for the next job; return it and its slot, or None when the server stops."""
        with self._wake:
            while True:
                job = min(
                    self._jobs, key=lambda waiting: self._turns.get(waiting.client, 0), default=None
                )
                if job is not None and self._may_begin(job):
                    break
                if job is None and self.state == "stopping":
                    return None
                self._wake.wait()
            self._jobs.remove(job)
            self._turns[job.client] = 1 + max(self._turns.values(), default=0)
            if not self._jobs:
                self._turns = {job.client: 1}
            self._running.add(job)
            pool = self._pool(job)
            if pool is None or isinstance(job, _ModelRequest):
                return job, None
            return job, pool.take(job.asked.tokens)

    def _may_begin(self, job: Job | _ModelRequest) -> bool:
        """Return whether a job may begin now; a change of the model must run alone."""
        if isinstance(job, _ModelRequest):
            return not self._running
        changing = any(isinstance(other, _ModelRequest) for other in self._running)
        pool = self._pool(job)
        return not changing and (pool is None or pool.free)

    def _answer(self, job: Job, slot: Slot | None) -> Event:
        """Run a job; return how it ended."""
        try:
            if job.cancelled.is_set() or time.monotonic() >= job.until:
                return too_late("the deadline passed before the request's turn came")
            job.begun = True
            assert slot is not None
            request = job.asked
            if isinstance(request, EmbeddingRequest):
                return self._embed(job, request)
            waited = time.monotonic() - job.came
            results: list[GenerationResult] = []
            while len(results) < request.count:
                generation = self._begin(job, request, slot, again=bool(results))
                job.attach(generation)
                self._stream(generation, job, len(results))
                results.append(generation.result)
            self.metrics.answered(len(request.tokens), slot.reused, waited, results)
            return self._result_event(results, slot)
        except EdgeError as problem:
            refusal = of_edge_error(problem)
            if refusal.status >= 500:
                tell_traceback()
            return refusal
        except Exception:  # the thread must outlive every request
            tell_traceback()
            return internal()

    def _embed(self, job: Job, request: EmbeddingRequest) -> Event:
        served, began = job.served or self.served, time.monotonic()
        assert served is not None
        embedder = served.model.embedder(capacity=served.slots.capacity)

        def halted() -> bool:
            return job.cancelled.is_set() or time.monotonic() >= job.until

        vectors: list[Vectors] = []
        for tokens in request.inputs:
            vector = embedder.embed(tokens, pooling=request.pooling, halted=halted)
            if vector is None:
                late = too_late("the deadline passed before all texts were read")
                return stopping() if self.state == "stopping" else late
            vectors.append(vector)
        self.metrics.embedded(request.count)
        return Embedded(request, tuple(vectors), time.monotonic() - began)

    def _begin(self, job: Job, request: ParsedRequest, slot: Slot, *, again: bool) -> Generation:
        remaining_s = max(job.until - time.monotonic(), 1e-9)
        params = replace(request.params, deadline_s=remaining_s)
        if again:
            return slot.again(params, continued=not request.chat, tools=request.tools)
        return slot.begin(
            request.tokens, params,
            continued=not request.chat, tools=request.tools, more=request.count > 1,
        )  # fmt: skip

    def _stream(self, generation: Generation, job: Job, choice: int) -> None:
        reported = 0
        for text in generation:
            logprobs = generation.logprobs(reported)
            reported += len(logprobs)
            job.post(Piece(text, choice, logprobs, generation.call_deltas()))

    def _result_event(self, results: Sequence[GenerationResult], slot: Slot) -> Event:
        last = results[-1]
        if last.finish_reason == "cancelled" and self.state == "stopping":
            return stopping()
        if last.finish_reason == "deadline" and not any(result.tokens for result in results):
            return too_late("the deadline passed before the prompt was read")
        self._log_drafting(last)
        return Ended(tuple(results), slot.reused)

    def _log_drafting(self, result: GenerationResult) -> None:
        """Log why drafting was given up, once per reason; answers only say that it was."""
        drafted = result.speculation
        problem = drafted.problem if drafted else ""
        if drafted and problem and problem != self._given_up:
            say(f"{drafted.drafter} given up: {problem}", file=sys.stderr, flush=True)
        self._given_up = problem
