"""Clients that leave, queues, deadlines, signals and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

import edge
from edge.apps import cli
from edge.apps.server import run
from edge.apps.server.app import App
from edge.apps.server.errors import ApiError
from edge.apps.server.prompts import Ask
from edge.apps.server.settings import Limits, Settings
from edge.apps.server.slot import Slot
from edge.apps.server.worker import Ended, Event, Job, Worker
from edge.runtime.model import Model
from edge.runtime.sampling import SamplingParams
from tests.server_process import ENDLESS, HELLO, PATIENCE, ROOT, Server, is_error, parsed, received

DRAFT = "demo-draft"  # without attention: its answers need not end
LONG: dict[str, Any] = {"model": DRAFT, "messages": HELLO, "stream": True, **ENDLESS}


def streaming(client: openai.OpenAI, **options: Any) -> Any:
    """A stream that has begun: its answer is being made."""
    stream = client.chat.completions.create(**{**LONG, **options})
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    return stream


# -- clients that leave (faults 27 and 29) -------------------------------------------------------


def test_an_answer_ends_with_its_client() -> None:
    """It would take many minutes. With no room to wait, others get in only when it has ended."""
    with Server("--queue", "0", "--deadline", "3600", bundle=DRAFT) as server:
        client = server.client()
        for _ in range(3):
            stream = streaming(client)
            with pytest.raises(openai.InternalServerError) as refused:
                client.chat.completions.create(model=DRAFT, messages=HELLO)
            assert refused.value.status_code == 503 and refused.value.code == "overloaded"
            assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
            stream.close()
            _until(lambda: _answers(client))


def test_one_that_waits_for_a_whole_answer_may_leave_too() -> None:
    with Server("--queue", "0", "--deadline", "3600", bundle=DRAFT) as server:
        client = server.client()
        with _asked(server, {"messages": HELLO, **ENDLESS}):
            assert not _answers(client)
        _until(lambda: _answers(client))


def test_those_who_wait_have_places_until_they_leave() -> None:
    body = {"messages": HELLO, "max_tokens": 2}
    with Server("--queue", "3", "--deadline", "3600", bundle=DRAFT) as server:
        client = server.client()
        stream = streaming(client)
        with _asked(server, body) as first, _asked(server, body) as last:
            with _asked(server, body):
                assert not _answers(client)

            def taken() -> bool:
                another = stack.enter_context(_asked(server, body))
                return not select.select([another], [], [], 0)[0]  # else it was refused

            stack = ExitStack()
            with stack:
                _until(taken)  # the one that left has made room
                assert not _answers(client)
                stream.close()
                for connection in (first, last):
                    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_requests_are_answered_in_the_order_they_came() -> None:
    worker, events, order = _worker(), _Events(), _Events()
    model = worker.check_ready()
    running = Job(_ask(model, "x"), time.monotonic() + PATIENCE, events.append)
    worker.submit(running)
    assert isinstance(events.first(), str)
    for name in "abcd":
        ask = _ask(model, name, 2)
        worker.submit(
            Job(ask, time.monotonic() + PATIENCE,
                lambda event, name=name: None if isinstance(event, str) else order.append(name))
        )  # fmt: skip
    running.cancel()
    assert [order.first() for _ in range(4)] == ["a", "b", "c", "d"]
    worker.stop()
    assert worker.join(PATIENCE)


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_cancel_takes_effect_within_one_step(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`at`: the run of the engine during which the client leaves; the first reads the prompt."""
    runs: list[int] = []
    worker = _worker()
    model = worker.check_ready()
    engine, events = model.engine, _Events()
    job = Job(_ask(model, "x " * 600), time.monotonic() + PATIENCE, events.append)
    real = engine.run

    def run(*arguments: Any, **options: Any) -> Any:
        runs.append(len(runs))
        if len(runs) == at:
            job.cancel()
        return real(*arguments, **options)

    monkeypatch.setattr(engine, "run", run)
    worker.submit(job)
    ended = events.last()
    assert isinstance(ended, Ended) and ended.result.finish_reason == "cancelled"
    assert len(runs) == at
    worker.submit(Job(_ask(model, "x", 3), time.monotonic() + PATIENCE, events.append))
    ended = events.last()
    assert isinstance(ended, Ended) and len(ended.result.tokens) == 3  # the engine is free
    worker.stop()
    assert worker.join(PATIENCE)


def test_what_was_cancelled_while_it_waited_never_begins() -> None:
    worker, events, left = _worker(), _Events(), _Events()
    model = worker.check_ready()
    running = Job(_ask(model, "x"), time.monotonic() + PATIENCE, events.append)
    waiting = Job(_ask(model, "y"), time.monotonic() + PATIENCE, left.append)
    late = Job(_ask(model, "z"), time.monotonic() - 1, left.append)
    worker.submit(running)
    assert isinstance(events.first(), str)
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
    worker, events = _worker(), _Events()
    model = worker.check_ready()

    def broken(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError("in the engine")

    with monkeypatch.context() as patch:
        patch.setattr(model.engine, "run", broken)
        worker.submit(Job(_ask(model, "x"), time.monotonic() + PATIENCE, events.append))
        problem = events.last()
    assert isinstance(problem, ApiError) and problem.status == 500
    assert "ZeroDivisionError" not in problem.message
    assert "ZeroDivisionError" in capsys.readouterr().err
    worker.submit(Job(_ask(model, "x", 3), time.monotonic() + PATIENCE, events.append))
    assert isinstance(events.last(), Ended)
    worker.stop()
    assert worker.join(PATIENCE)


# -- before it is ready, and when its turn never comes -------------------------------------------


def test_while_it_loads_it_says_so() -> None:
    loaded = threading.Event()
    model = edge.load(DRAFT, threads=1)

    def load() -> tuple[Model, Slot]:
        assert loaded.wait(PATIENCE)
        return model, Slot(model, capacity=None, cache_bytes=0)

    ready = threading.Event()
    worker = Worker(load, ready.set)
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
    worker = _worker()
    monkeypatch.setattr(worker, "submit", lambda job: None)  # its turn never comes
    app = App(_settings(Limits(deadline_s=0.05)), worker)
    status, headers, body = _call(app, "POST", "/v1/completions", {"prompt": "x"})
    assert status == 504 and is_error(body) and body["error"]["code"] == "deadline_exceeded"
    assert headers["x-should-retry"] == "false"
    worker.stop()
    assert worker.join(PATIENCE)


def test_a_prompt_that_outlasts_the_deadline_is_given_up() -> None:
    with Server("--deadline", "0.1", bundle=DRAFT) as server:
        with pytest.raises(openai.InternalServerError) as late:
            server.client().completions.create(model=DRAFT, prompt=[5] * 32_000)
        assert late.value.status_code == 504 and late.value.code == "deadline_exceeded"


# -- signals and exit codes (fault 35) -----------------------------------------------------------


def test_sigterm_lets_the_running_answer_finish() -> None:
    with Server(bundle=DRAFT) as server:
        stream = streaming(server.client(), max_tokens=400)
        server.process.send_signal(signal.SIGTERM)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.left() == 0


def test_sigterm_refuses_what_waits_and_cuts_what_takes_too_long() -> None:
    with Server("--grace", "0.2", "--deadline", "3600", bundle=DRAFT) as server:
        client = server.client()
        stream = streaming(client)
        with _asked(server, {"messages": HELLO}) as waiting:
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError) as cut:
                list(stream)
            assert cut.value.code == "shutting_down"
            status, fields, body = parsed(received(waiting))
        assert (status, body["error"]["code"]) == (503, "shutting_down") and fields["retry-after"]
        assert server.left() == 0


def test_a_second_signal_leaves_at_once() -> None:
    with Server("--grace", "600", "--deadline", "3600", bundle=DRAFT) as server:
        streaming(server.client())
        server.process.send_signal(signal.SIGTERM)
        server.said("stopping")
        server.process.send_signal(signal.SIGTERM)
        assert server.left() == 128 + signal.SIGTERM


def test_ctrl_c_is_told_apart_from_being_stopped() -> None:
    with Server() as server:
        with server.connect() as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in idle.recv(1 << 16)
            server.process.send_signal(signal.SIGINT)
            received(idle)  # closed, not left hanging
        assert server.left() == 130


# -- how it is started ---------------------------------------------------------------------------


def test_a_key_is_made_and_told_once_unless_one_is_given() -> None:
    with Server(key=None) as server, Server() as other:
        made = server.start["api_key"]
        assert len(made) > 30 and other.start["api_key"] is None
        assert server.start["pid"] == server.process.pid
        assert server.start["url"].startswith("http://127.0.0.1:")
        assert server.request("GET", "/v1/models")[0] == 200
        assert server.request("GET", "/v1/models", headers={"authorization": None})[0] == 401


def test_no_key_on_loopback_still_keeps_pages_out() -> None:
    with Server("--no-key") as server:
        bare = {"authorization": None}
        assert server.request("GET", "/v1/models", headers=bare)[0] == 200
        for page in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            assert server.request("GET", "/v1/models", headers=bare | page)[0] == 403


@pytest.mark.parametrize(
    "options, code, said",
    [
        (["/nowhere/at/all", "--port", "0"], 1, "/nowhere/at/all"),
        (["demo", "--port", "0", "--no-key", "--host", "0.0.0.0"], 1, "--no-key"),
        (["demo", "--no-key", "--api-key", "x"], 1, "--no-key"),
        (["demo", "--api-key", "two words"], 1, "--api-key"),
        (["demo", "--api-key", ""], 1, "--api-key"),
        (["demo", "--host", "no.such.host.invalid"], 1, "--host"),
        (["demo", "--port", "0", "--allow-origin", "*"], 1, "--allow-origin"),
        (["demo", "--port", "0", "--engine", "cuda"], 1, "cuda"),
        (["demo", "--port", "0", "--host", "::1", "--engine", "tensorrt"], 1, "tensorrt"),
        (["demo", "--port", "70000"], 2, "--port"),
        (["demo", "--deadline", "nan"], 2, "--deadline"),
        (["demo", "--queue", "-1"], 2, "--queue"),
        ([], 2, "bundle"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_served_is_refused(
    options: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("EDGE_API_KEY", raising=False)
    monkeypatch.setattr(sys, "argv", ["edge", "serve", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_named() -> None:
    with run.bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        ended = _edge("serve", "demo", "--port", str(port))
    assert ended.returncode == 1 and f"port {port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_its_packages_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('no', name='uvicorn')\n")
    ended = _edge("serve", "demo", path=tmp_path)
    assert ended.returncode == 1 and "mamba-edge[server]" in ended.stderr
    assert _edge("info", "demo", path=tmp_path).returncode == 0


# -- helpers -------------------------------------------------------------------------------------


class _Events:
    """What a job posts, for a thread that waits."""

    def __init__(self) -> None:
        self._all: list[Event] = []
        self._more = threading.Condition()

    def append(self, event: Event) -> None:
        with self._more:
            self._all.append(event)
            self._more.notify()

    def first(self) -> Event:
        """The next event."""
        with self._more:
            assert self._more.wait_for(lambda: self._all, PATIENCE)
            return self._all.pop(0)

    def last(self) -> Event:
        """The next event that ends an answer."""
        while isinstance(event := self.first(), str):
            pass
        return event


def _worker() -> Worker:
    """One that is ready."""
    model, ready = edge.load(DRAFT, threads=1), threading.Event()
    worker = Worker(lambda: (model, Slot(model, capacity=None, cache_bytes=1 << 20)), ready.set)
    worker.start()
    assert ready.wait(PATIENCE)
    return worker


def _ask(model: Model, text: str, max_tokens: int = 1_000_000) -> Ask:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logit_bias={6: -100.0})
    return Ask(False, tuple(model.tokenizer.encode(text)), params, False, False)


def _settings(limits: Limits | None = None) -> Settings:
    return Settings("demo", None, frozenset({"localhost"}), limits=limits or Limits())


def _call(app: App, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
    """One request to the application, without a server around it."""
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


def _answers(client: openai.OpenAI) -> bool:
    """Whether there is room for a short request; it is answered then."""
    try:
        client.chat.completions.create(model=DRAFT, messages=HELLO, max_tokens=1)
    except openai.InternalServerError as problem:
        assert problem.code == "overloaded"
        return False
    return True


def _until(holds: Callable[[], bool]) -> None:
    """Ask again until it holds; every question is a round trip to the server."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end


@contextmanager
def _asked(server: Server, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection on which a chat was asked for; the server has taken it up."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"authorization: Bearer {server.key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    with server.connect() as connection:
        connection.sendall(head.encode() + data)
        _settle(server)
        yield connection


def _settle(server: Server) -> None:
    """The server has read everything sent to it before: it answers on its one event loop."""
    for _ in range(3):
        assert server.request("GET", "/v1/models")[0] == 200


def _edge(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    environment.pop("EDGE_API_KEY", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-m", "edge.apps.cli", *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
