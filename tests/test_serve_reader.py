"""Requests that cannot be read in time, and faults after an answer has begun."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any, cast

import pytest

from edge.apps.serve import app, reader
from edge.apps.serve.answers import AnswerFormat
from edge.apps.serve.errors import ApiError
from edge.apps.serve.jobs import Piece
from edge.apps.serve.reader import Reader
from tests.server_process import HELLO, PATIENCE, Server

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(bundle="demo-draft") as running:
        yield running


def test_what_is_read_too_long_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client gets an error in time, others are read, and health reports it until it ends."""
    monkeypatch.setattr(reader, "STUCK_S", 0.2)
    never, reading = threading.Event(), Reader()

    def soon(seconds: float = 60.0) -> float:
        return time.monotonic() + seconds

    async def talk() -> None:
        assert await reading.read(lambda: 1, soon()) == 1
        with pytest.raises(ZeroDivisionError):
            await reading.read(lambda: 1 // 0, soon())
        assert not reading.stuck
        slow = asyncio.ensure_future(reading.read(lambda: never.wait(PATIENCE), soon()))
        while not reading.stuck:  # before its deadline, too
            await asyncio.sleep(0.01)
        assert not slow.done()
        never.set()
        assert await slow
        while reading.stuck:  # until its thread has returned
            await asyncio.sleep(0.01)

        never.clear()
        begun = threading.Event()

        def waits() -> bool:
            begun.set()
            return never.wait()

        for left in (0.3, 3.0, 30.0):  # on a busy machine it may begin too late
            with pytest.raises(ApiError) as refused:
                await reading.read(waits, soon(left))
            assert refused.value.status == 504
            if begun.is_set():
                break
        assert await reading.read(lambda: 2, soon()) == 2
        assert await reading.read(lambda: 3, soon()) == 3
        assert reading.stuck
        never.set()
        while reading.stuck:
            await asyncio.sleep(0.01)
        with pytest.raises(ApiError):
            await reading.read(lambda: 4, soon(-1.0))

    asyncio.run(asyncio.wait_for(talk(), 2 * PATIENCE))


def test_a_fault_in_the_middle_of_a_stream_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        async def next(self) -> str:
            raise OSError("no such thing")

    class Form(AnswerFormat):
        def __init__(self) -> None:
            pass

        def opening(self) -> list[Any]:
            return []

        def piece(self, piece: Piece) -> dict[str, str]:
            return {"text": piece.text}

    async def sent() -> list[bytes]:
        form, broken, asked = cast("tuple[Any, Any, Any]", (Form(), Broken(), None))
        return [part async for part in app.answer_chunks(form, Piece("a"), broken, asked, {})]

    first, last = asyncio.run(sent())
    assert json.loads(first[6:]) == {"text": "a"}
    assert json.loads(last[6:])["error"]["code"] == "internal_error"
    assert "no such thing" in capsys.readouterr().err


def test_a_body_of_two_lengths_is_refused_and_the_connection_closed(server: Server) -> None:
    """It may be two requests to a proxy before us (RFC 9112, 6.3)."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {server.key}\r\n"
        "content-type: application/json\r\ncontent-length: 6\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    smuggled = "0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    status, fields, body = server.raw((head + smuggled).encode())
    assert status == 400 and fields["connection"] == "close"
    assert "transfer-encoding" in body["error"]["message"]


def test_bodies_that_trickle_in_take_nobodys_place(server: Server) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {server.key}\r\n"
        'content-type: application/json\r\ncontent-length: 500\r\n\r\n{"'
    ).encode()
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    try:
        for connection in slow:
            connection.sendall(head)
        time.sleep(0.2)
        status, _, body = server.request("POST", CHAT, {"messages": HELLO, "max_tokens": 1})
        assert status == 200, body
    finally:
        for connection in slow:
            connection.close()


def test_connections_that_say_nothing_make_room(server: Server) -> None:
    """Connections without a key, beyond the limit, make room; those that came with the key stay."""
    ask = {"messages": HELLO, "max_tokens": 1}
    headers = {"content-type": "application/json", "authorization": f"Bearer {server.key}"}
    known = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    silent: list[socket.socket] = []
    try:
        for _ in range(2):
            known.request("POST", CHAT, json.dumps(ask), headers)
            assert json.loads(known.getresponse().read())["choices"]
            silent += [server.connect() for _ in range(270)]
            for connection in silent[::2]:
                with suppress(OSError):
                    connection.sendall(b"GET /health HTTP/1.1\r\n")
            assert server.request("POST", CHAT, ask)[0] == 200
    finally:
        known.close()
        for connection in silent:
            connection.close()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"best_of": 2}, "must be 1"),
        ({"logit_bias": {"x": 1}}, "token ids"),
        ({"logit_bias": {"-1": 1}}, "token ids"),
        ({"logit_bias": {"3": 500}}, "must be at most 100, not 500"),
        ({"stream": True, "stream_options": {"other": 1}}, "unknown parameter"),
        ({"temperatur": 1}, "'temperatur' (did you mean 'temperature'?)"),
        ({"prompt": "x"}, "unknown parameter 'prompt' (it belongs to /v1/completions)"),
        (
            {"messages": "hi", "stream": "maybe", "top_logprobs": 100, "logprobs": True},
            'stream: must be true or false, not "maybe"; messages: must be a list, not "hi"; '
            "top_logprobs: must be at most 20, not 100",
        ),
        ({"messages": [{"role": "usr", "content": "x"}]}, "or 'tool' (did you mean 'user'?)"),
    ],
)
def test_refusals_say_what_to_send(server: Server, extra: dict[str, Any], said: str) -> None:
    status, _, body = server.request("POST", CHAT, {"messages": HELLO, **extra})
    assert status == 400 and said in body["error"]["message"], body
    assert "Input" not in body["error"]["message"] and "pattern" not in body["error"]["message"]
