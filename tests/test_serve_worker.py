"""The worker's thread and the application around it, without a server: order, ends, failures."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.apps.serve.app import App
from edge.apps.serve.errors import ApiError
from edge.apps.serve.jobs import Ended, Event, Job, Piece
from edge.apps.serve.requests import ParsedRequest
from edge.apps.serve.settings import ServerLimits, ServerSettings
from edge.apps.serve.slot import Slot
from edge.apps.serve.worker import ModelWorker
from edge.runtime.model import Model
from edge.runtime.parameters import SamplingParams
from tests.server_process import PATIENCE, is_error

DRAFT = "demo-draft"  # without attention: its answers need not end


def test_clients_take_turns_and_each_is_answered_in_the_order_it_asked() -> None:
    worker, events, order = new_worker(), Events(), Events()
    model = model_of(worker)
    running = Job(ask(model, "x"), time.monotonic() + PATIENCE, events.append, client="many")
    worker.submit(running)
    assert isinstance(events.first(), Piece)
    asked = [("many", "a"), ("many", "b"), ("many", "c"), ("one", "d"), ("other", "e")]
    for client, name in asked:
        request = ask(model, name, 2)
        worker.submit(
            Job(request, time.monotonic() + PATIENCE,
                lambda event, name=name: None if isinstance(event, Piece) else order.append(name),
                client=client)
        )  # fmt: skip
    running.cancel()
    assert [order.first() for _ in asked] == ["d", "e", "a", "b", "c"]
    worker.stop()
    assert worker.join(PATIENCE)


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_cancel_takes_effect_within_one_step(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`at`: the engine run during which the client disconnects; the first reads the prompt."""
    runs: list[int] = []
    worker = new_worker()
    model = model_of(worker)
    engine, events = model.engine, Events()
    job = Job(ask(model, "x " * 600), time.monotonic() + PATIENCE, events.append)
    real = engine.run

    def run(*arguments: Any, **options: Any) -> Any:
        runs.append(len(runs))
        if len(runs) == at:
            job.cancel()
        return real(*arguments, **options)

    monkeypatch.setattr(engine, "run", run)
    worker.submit(job)
    ended = events.last()
    assert isinstance(ended, Ended) and ended.results[0].finish_reason == "cancelled"
    assert len(runs) == at
    worker.submit(Job(ask(model, "x", 3), time.monotonic() + PATIENCE, events.append))
    ended = events.last()
    assert isinstance(ended, Ended) and len(ended.results[0].tokens) == 3  # the engine is free
    worker.stop()
    assert worker.join(PATIENCE)


def test_what_was_cancelled_while_it_waited_never_begins() -> None:
    worker, events, left = new_worker(), Events(), Events()
    model = model_of(worker)
    running = Job(ask(model, "x"), time.monotonic() + PATIENCE, events.append)
    waiting = Job(ask(model, "y"), time.monotonic() + PATIENCE, left.append)
    late = Job(ask(model, "z"), time.monotonic() - 1, left.append)
    worker.submit(running)
    assert isinstance(events.first(), Piece)
    worker.submit(waiting)
    waiting.cancel()
    worker.submit(late)
    running.cancel()
    for _ in range(2):
        problem = left.last()
        assert isinstance(problem, ApiError) and problem.code == "deadline_exceeded"
    assert not waiting.begun and not late.begun
    worker.stop()
    assert worker.join(PATIENCE)


def test_a_failure_inside_is_told_and_the_next_request_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker, events = new_worker(), Events()
    model = model_of(worker)

    def broken(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError("in the engine")

    with monkeypatch.context() as patch:
        patch.setattr(model.engine, "run", broken)
        worker.submit(Job(ask(model, "x"), time.monotonic() + PATIENCE, events.append))
        problem = events.last()
    assert isinstance(problem, ApiError) and problem.status == 500
    assert "ZeroDivisionError" not in problem.message
    assert "ZeroDivisionError" in capsys.readouterr().err
    worker.submit(Job(ask(model, "x", 3), time.monotonic() + PATIENCE, events.append))
    assert isinstance(events.last(), Ended)
    worker.stop()
    assert worker.join(PATIENCE)


def test_while_it_loads_it_says_so() -> None:
    loaded = threading.Event()
    model = edge.load(DRAFT, threads=1)

    def load() -> tuple[Model, list[Slot]]:
        assert loaded.wait(PATIENCE)
        return model, [Slot(model, capacity=None, cache_bytes=0)]

    ready = threading.Event()
    worker = ModelWorker(load, ready.set, name="demo")
    app = App(_settings(), worker)
    worker.start()
    status, headers, body = _call(app, "GET", "/health")
    assert (status, body) == (503, {"status": "loading"}) and "retry-after" in headers
    status, headers, body = _call(app, "POST", "/v1/completions", {"prompt": "x"})
    assert status == 503 and body["error"]["code"] == "model_loading" and "retry-after" in headers
    assert _call(app, "GET", "/v1/models")[0] == 200
    loaded.set()
    assert ready.wait(PATIENCE)
    assert _call(app, "GET", "/health")[0] == 200
    assert _call(app, "POST", "/v1/completions", {"prompt": "x"})[0] == 200
    worker.stop()
    assert worker.join(PATIENCE)
    assert _call(app, "GET", "/health")[2] == {"status": "stopping"}
    assert _call(app, "POST", "/v1/completions", {"prompt": "x"})[2]["error"]["code"] == (
        "shutting_down"
    )


def test_a_deadline_counts_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = new_worker()
    monkeypatch.setattr(worker, "submit", lambda job: None)  # its turn never comes
    app = App(_settings(ServerLimits(deadline_s=0.05)), worker)
    status, headers, body = _call(app, "POST", "/v1/completions", {"prompt": "x"})
    assert status == 504 and is_error(body) and body["error"]["code"] == "deadline_exceeded"
    assert headers["x-should-retry"] == "false"
    worker.stop()
    assert worker.join(PATIENCE)


# -- helpers -------------------------------------------------------------------------------------


class Events:
    """The events of a job, for a thread that waits."""

    def __init__(self) -> None:
        self._all: list[Event] = []
        self._more = threading.Condition()

    def append(self, event: Event) -> None:
        with self._more:
            self._all.append(event)
            self._more.notify()

    def first(self) -> Event:
        """Return the next event."""
        with self._more:
            assert self._more.wait_for(lambda: self._all, PATIENCE)
            return self._all.pop(0)

    def last(self) -> Event:
        """Return the next event that ends an answer."""
        while isinstance(event := self.first(), Piece):
            pass
        return event


def new_worker() -> ModelWorker:
    """Return a worker that is ready."""
    model, ready = edge.load(DRAFT, threads=1), threading.Event()
    worker = ModelWorker(
        lambda: (model, [Slot(model, capacity=None, cache_bytes=1 << 20)]), ready.set, name="demo"
    )
    worker.start()
    assert ready.wait(PATIENCE)
    return worker


def model_of(worker: ModelWorker) -> Model:
    assert worker.served is not None
    return worker.served.model


def ask(model: Model, text: str, max_tokens: int = 1_000_000) -> ParsedRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logit_bias={6: -100.0})
    return ParsedRequest(False, tuple(model.tokenizer.encode(text)), params, False, False)


def _settings(limits: ServerLimits | None = None) -> ServerSettings:
    hosts = frozenset({"localhost"})
    return ServerSettings("demo", Path(), None, hosts, limits=limits or ServerLimits())


def _call(app: App, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
    """Send one request to the application, without a server around it."""
    sent: list[Any] = []

    async def one() -> None:
        data: asyncio.Queue[Any] = asyncio.Queue()
        data.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "http_version": "1.1", "method": method, "path": path,
                 "raw_path": path.encode(), "query_string": b"", "headers": headers}  # fmt: skip
        await app(scope, data.get, send)

    asyncio.run(one())
    fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], fields, json.loads(b"".join(part["body"] for part in sent[1:]))
