"""Clients that disconnect, full queues, signals, exit codes: real server processes."""

from __future__ import annotations

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from edge.apps import cli, serve
from edge.apps.serve import run
from edge.runtime.model import resolve
from tests.facts import says
from tests.programs import called
from tests.server_process import ENDLESS, HELLO, PATIENCE, ROOT, Server, parsed, received

DRAFT = "demo-draft"  # without attention: its answers need not end
LONG: dict[str, Any] = {"model": DRAFT, "messages": HELLO, "stream": True, **ENDLESS}


def streaming(client: openai.OpenAI, **options: Any) -> Any:
    """Return a stream whose answer is being generated."""
    stream = client.chat.completions.create(**{**LONG, **options})
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    return stream


def _read(stream: Any) -> None:
    """Read until it is closed, also from another thread."""
    with suppress(Exception):
        for _ in stream:
            pass


# -- disconnecting clients (faults 27 and 29) ----------------------------------------------------


@pytest.fixture(scope="module")
def without_queue() -> Iterator[Server]:
    """Yield a server of one answer at a time, which accepts a request only when it is idle."""
    with Server("--parallel", "1", "--queue", "0", "--deadline", "3600", bundle=DRAFT) as server:
        yield server


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """Yield a server of one answer at a time, which waits long for clients that do not read."""
    with Server("--parallel", "1", "--send-timeout", "1000", bundle=DRAFT) as server:
        yield server


def test_an_answer_ends_with_its_client(without_queue: Server) -> None:
    """It would take many minutes. Without room in the queue, others are accepted only after it
    ends.
    """
    client = without_queue.client()
    for _ in range(3):
        stream = streaming(client)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model=DRAFT, messages=HELLO)
        assert refused.value.status_code == 429 and refused.value.code == "overloaded"
        assert says(refused.value.message, "1 requests", "waiting")
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
        stream.close()
        _until(lambda: _answers(client))


def test_one_that_waits_for_a_whole_answer_may_leave_too(without_queue: Server) -> None:
    client = without_queue.client()
    with _asked(without_queue, {"messages": HELLO, **ENDLESS}):
        assert not _answers(client)
    _until(lambda: _answers(client))


def test_those_who_wait_have_places_until_they_leave() -> None:
    body = {"messages": HELLO, "max_tokens": 2}
    with Server("--parallel", "1", "--queue", "3", "--deadline", "3600", bundle=DRAFT) as server:
        client = server.client()
        stream = streaming(client)
        reader = threading.Thread(target=_read, args=(stream,))  # otherwise it would make room
        reader.start()
        with _asked(server, body) as first, _asked(server, body) as last:
            with _asked(server, body):
                assert not _answers(client)
                # a client from an address with no connection is accepted
                with _asked(server, body, "127.0.0.2") as newcomer:
                    assert not select.select([newcomer], [], [], 0.3)[0]

            def taken() -> bool:
                another = stack.enter_context(_asked(server, body))
                # otherwise it was refused, which a busy machine says a little later
                return not select.select([another], [], [], 0.3)[0]

            stack = ExitStack()
            with stack:
                _until(taken)  # the disconnected one has made room
                assert not _answers(client)
                stream.close()
                for connection in (first, last):
                    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        reader.join(PATIENCE)


def test_a_prompt_that_outlasts_the_deadline_is_given_up() -> None:
    with Server("--deadline", "0.1", bundle=DRAFT) as server:
        with pytest.raises(openai.InternalServerError) as late:
            server.client().completions.create(model=DRAFT, prompt=[5] * 32_000)
        assert late.value.status_code == 504 and late.value.code == "deadline_exceeded"


def test_a_stream_that_nobody_reads_makes_room(patient: Server) -> None:
    """However long it may stay unread when nobody else asks."""
    unread = {"messages": HELLO, "stream": True, **ENDLESS}
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        idle.connect(("127.0.0.1", patient.port))
        idle.sendall(_request(patient, unread))
        _settle(patient)
        assert _answers(patient.client())


def test_a_stream_that_is_read_slowly_goes_on_while_others_wait(patient: Server) -> None:
    """The client reads a tenth of what the model could write, and more than half of WAITED_FOR; for
    three times as long as CATCH_UP_S.
    """
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", patient.port))
        slow.sendall(_request(patient, {"messages": HELLO, "stream": True, **ENDLESS}))
        with _asked(patient, {"messages": HELLO, "max_tokens": 2}) as waiting:
            end = time.monotonic() + 3
            while time.monotonic() < end:
                assert len(slow.recv(2048)) > 0
                time.sleep(0.01)
            assert not select.select([waiting], [], [], 0)[0]


# -- signals and exit codes (fault 35) -----------------------------------------------------------


def test_sigterm_lets_the_running_answer_finish() -> None:
    with Server("--grace", "600", bundle=DRAFT) as server:
        stream = streaming(server.client(), max_tokens=400)
        server.process.send_signal(signal.SIGTERM)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.left() == 0


def test_sigterm_refuses_what_waits_and_cuts_what_takes_too_long() -> None:
    with Server("--parallel", "1", "--grace", "0.2", "--deadline", "3600", bundle=DRAFT) as server:
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
        stream = streaming(server.client())
        server.process.send_signal(signal.SIGTERM)
        server.said("stopping")
        server.process.send_signal(signal.SIGTERM)
        assert server.left() == 128 + signal.SIGTERM
        stream.close()  # open until here, or the answer would end with its client


def test_ctrl_c_is_told_apart_from_being_stopped() -> None:
    with Server() as server:
        assert server.start["api_key"] is None  # a given one is not told
        with server.connect() as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in idle.recv(1 << 16)
            server.process.send_signal(signal.SIGINT)
            received(idle)  # closed, not left hanging
        assert server.left() == 130


# -- starting ------------------------------------------------------------------------------------


def test_a_key_is_made_and_told_once_unless_one_is_given() -> None:
    """A given one is not told: see `test_ctrl_c_is_told_apart_from_being_stopped`."""
    with Server(key=None, anew=True) as server:
        assert len(server.start["api_key"]) > 30
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
        (["demo", "--port", "0", "--no-key", "--host", "0.0.0.0"], 2, "--no-key"),
        (["demo", "--no-key", "--api-key", "x"], 2, "--no-key"),
        (["demo", "--api-key", "two words"], 2, "--api-key"),
        (["demo", "--api-key", ""], 2, "--api-key"),
        (["demo", "--host", "no.such.host.invalid"], 1, "--host"),
        (["demo", "--port", "0", "--allow-origin", "*"], 2, "--allow-origin"),
        (["demo", "--port", "0", "--engine", "cuda"], 1, "cuda"),
        (["demo", "--port", "0", "--host", "::1", "--engine", "tensorrt"], 1, "TensorRT"),
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
    # the driver's own name is CUDA
    assert said.lower() in capsys.readouterr().err.lower()


def test_small_pieces_are_sent_at_once() -> None:
    """asyncio sets TCP_NODELAY only if the protocol is named; otherwise answers take 40 ms more."""
    for host in ("127.0.0.1", "localhost"):
        with run.bind(host, 0) as listening:
            assert listening.proto == socket.IPPROTO_TCP


def test_a_port_that_is_taken_is_named() -> None:
    with run.bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        code, _, said = called(cli.main, "serve", "demo", "--port", port)
    assert code == 1 and f"port {port}" in said


def test_without_its_packages_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('no', name='uvicorn')\n")
    ended = _edge("serve", "demo", path=tmp_path)
    assert ended.returncode == 1 and "mamba-edge[server]" in ended.stderr
    assert _edge("info", "demo", path=tmp_path).returncode == 0


# -- helpers -------------------------------------------------------------------------------------


def _answers(client: openai.OpenAI) -> bool:
    """Return whether there is room for a short request, by having it answered."""
    try:
        client.chat.completions.create(model=DRAFT, messages=HELLO, max_tokens=1)
    except openai.RateLimitError as problem:
        assert problem.code == "overloaded"
        return False
    return True


def _until(holds: Callable[[], bool]) -> None:
    """Poll until a condition holds; each try is a round trip to the server."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end


@contextmanager
def _asked(
    server: Server, body: dict[str, Any], address: str = "127.0.0.1"
) -> Iterator[socket.socket]:
    """Return a connection from `address` with a chat request that the server has accepted."""
    there = "127.0.0.1", server.port
    with socket.create_connection(there, PATIENCE, (address, 0)) as connection:
        connection.sendall(_request(server, body))
        _settle(server)
        yield connection


def _request(server: Server, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"authorization: Bearer {server.key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _settle(server: Server) -> None:
    """Wait until the server has read everything sent before: it answers on its one event loop."""
    for _ in range(3):
        assert server.request("GET", "/v1/models")[0] == 200


def _edge(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": str(path)}
    environment.pop("EDGE_API_KEY", None)
    return subprocess.run(
        [sys.executable, "-m", "edge.apps.cli", *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "parallel", "said"),
    [
        ("ort", "2", "2 answers in turn, no faster"),
        ("cpu", "2", "2 answers at once"),
        ("cpu", "1", "one answer at a time"),
    ],
)
def test_the_start_says_how_many_answers_are_made_at_once(
    engine: str, parallel: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    linked = tmp_path / "mymodel"  # is named as typed, not after the link's target
    linked.symlink_to(resolve("demo"))
    server = Server("--engine", engine, "--parallel", parallel, bundle=str(linked))
    try:
        assert server.said("listening")["model"] == "mymodel"
        ready = server.said("ready")
    finally:
        server.__exit__()
    assert ready["parallel"] == int(parallel) and ready["joined"] == (said == "2 answers at once")
    serve.say_text(ready)
    assert f"; {said}" in capsys.readouterr().err
