"""Requests from strangers and broken programs: raw sockets against a real server process."""

from __future__ import annotations

import http.client
import json
import random
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server_process import ENDLESS, HELLO, KEY, PATIENCE, Server, is_error, parsed, received

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": HELLO, "max_tokens": 1}
ROUTES = [("GET", "/v1/models"), ("GET", "/v1/models/demo"), ("POST", CHAT),
          ("POST", "/v1/completions"), ("GET", "/nowhere"), ("DELETE", CHAT)]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--receive-timeout", "1", "--send-timeout", "1", "--max-body-kib", "64") as running:
        yield running


def alive(server: Server) -> bool:
    """Return whether the server still answers."""
    return server.request("POST", CHAT, ASK)[0] == 200


# -- who may call (faults 55 and 56) -------------------------------------------------------------


@pytest.mark.parametrize("method, path", ROUTES)
@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}",
              f"Basic {KEY}", KEY, "Bearer \xe9"]
)  # fmt: skip
def test_without_the_key_every_route_but_health_is_closed(
    server: Server, method: str, path: str, given: str | None
) -> None:
    status, fields, body = server.request(method, path, {}, {"authorization": given})
    assert status == 401 and is_error(body) and body["error"]["code"] == "invalid_api_key"
    assert fields["www-authenticate"] == "Bearer"


def test_health_needs_no_key(server: Server) -> None:
    status, _, body = server.request("GET", "/health", headers={"authorization": None})
    assert (status, body) == (200, {"status": "ok"})
    assert server.request("HEAD", "/health")[0] == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:80",
             "10.0.0.1", "[::2]", "localhost:x", "", "local host", "0.0.0.0"]
)  # fmt: skip
def test_a_name_that_is_not_ours_is_refused(server: Server, path: str, host: str) -> None:
    """DNS rebinding: the page of evil.example reaches us under its own name."""
    status, _, body = server.request("GET", path, headers={"host": host})
    assert status == 403 and body["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST:1234", "localhost.", "[::1]:80", "127.0.0.2"]
)
def test_names_of_this_machine_are_ours_at_any_port(server: Server, host: str) -> None:
    assert server.request("GET", "/v1/models", headers={"host": host})[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", ""])
def test_pages_may_not_call(server: Server, origin: str) -> None:
    for method in ("POST", "OPTIONS"):
        status, fields, body = server.request(method, CHAT, ASK, {"origin": origin})
        assert status == 403 and body["error"]["code"] == "origin_not_allowed"
        assert not [name for name in fields if name.startswith("access-control")]


def test_a_form_cannot_pass_for_json(server: Server) -> None:
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert server.request("POST", CHAT, ASK, {"content-type": kind})[0] == 415
    charset = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.request("POST", CHAT, ASK, charset)[0] == 200
    assert server.request("POST", CHAT, ASK, {"content-encoding": "gzip"})[0] == 415


def test_further_hosts_and_origins_can_be_allowed() -> None:
    page = "https://app.example"
    with Server("--allow-host", "robot.local", "--allow-origin", page) as server:
        assert server.request("GET", "/v1/models", headers={"host": "robot.local:8080"})[0] == 200
        status, fields, _ = server.request("POST", CHAT, ASK, {"origin": page})
        assert status == 200 and fields["access-control-allow-origin"] == page
        asked = {"origin": page, "authorization": None, "access-control-request-method": "POST"}
        status, fields, _ = server.request("OPTIONS", CHAT, headers=asked)
        assert status == 204 and "authorization" in fields["access-control-allow-headers"]
        other = {"origin": "https://other.example"}
        assert server.request("POST", CHAT, ASK, other)[0] == 403


# -- invalid requests (faults 21, 58, 59) --------------------------------------------------------


def test_errors_of_every_kind_have_the_apis_shape(server: Server) -> None:
    cases = {
        404: server.request("GET", "/v2/models"),
        405: server.request("GET", CHAT),
        413: server.request("POST", CHAT, b"x" * (65 << 10)),
        415: server.request("POST", CHAT, ASK, {"content-type": "text/html"}),
    }
    for expected, (status, _, body) in cases.items():
        assert status == expected and is_error(body), body
    assert cases[405][1]["allow"] == "POST"


@pytest.mark.parametrize(
    "data, status",
    [
        (b"\x00\xff\x16\x03\x01\r\n\r\n", 400),
        (b"hello\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no host
        (b"GET /health HTTP/1.0\r\n\r\n", 403),  # may have no host, but then it is not ours
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx\r\n\r\n", 400),
        (b"GET /h\xc3\xa9 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: " + b"y" * 20_000
         + b"\r\n\r\n", 431),
        (b"GET /" + b"y" * 20_000 + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
         431),
        (b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n"
         b"\r\n", 400),
        (b"POST /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ],
    ids=range(13),
)  # fmt: skip
def test_what_is_no_http_is_refused(server: Server, data: bytes, status: int) -> None:
    found, _, body = server.raw(data)
    assert found == status and is_error(body), body


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\xc3"}', b'{"a": 1, "a": 2}',
     b'{"temperature": NaN}', b"[" * 60_000, b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}",
     b'{"seed": ' + b"9" * 5000 + b"}", b"{} {}"],
    ids=range(13),
)  # fmt: skip
def test_what_is_no_json_is_refused(server: Server, body: bytes) -> None:
    status, _, answer = server.request("POST", "/v1/completions", body)
    assert status == 400 and is_error(answer)
    assert answer["error"]["code"] == "invalid_json"


def test_numbers_beyond_all_bounds_are_refused(server: Server) -> None:
    status, _, answer = server.request(
        "POST", "/v1/completions", b'{"prompt": "x", "temperature": 1e999}'
    )
    assert status == 400 and "too large a number" in answer["error"]["message"]


def test_a_body_in_chunks_is_taken_and_bounded(server: Server) -> None:
    head = {"content-length": None, "transfer-encoding": "chunked"}
    data = json.dumps(ASK).encode()
    good = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (9, data[:9], len(data) - 9, data[9:])
    assert server.request("POST", CHAT, good, head)[0] == 200
    status, _, body = server.request("POST", CHAT, b"zz\r\n", head)
    assert status == 400 and is_error(body)
    # never-ending: refused once it is too large, not when it ends
    with server.connect() as connection:
        connection.sendall(_head(server, head))
        piece = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
        while not select.select([connection], [], [], 0)[0]:
            connection.sendall(piece)
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_announced_too_large_is_refused_before_it_comes(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(_head(server, {"content-length": "70000", "expect": "100-continue"}))
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 413 ")
    with server.connect() as connection:
        data = json.dumps(ASK).encode()
        connection.sendall(
            _head(server, {"content-length": str(len(data)), "expect": "100-continue",
                           "connection": "close"})
        )  # fmt: skip
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(data)
        assert parsed(received(connection))[0] == 200


def test_random_bytes_and_random_bodies_never_break_it(server: Server) -> None:
    """No 5xx, no silence, no traceback (the fixture looks for one at the end)."""
    rng = random.Random(11)
    good = json.dumps({"messages": HELLO, "max_tokens": 1, "stop": ["a"], "seed": 5}).encode()
    for _ in range(150):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        status, _, body = server.request("POST", CHAT, bytes(data))
        assert status == 200 or (status in (400, 404) and is_error(body)), (data, body)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    for _ in range(100):
        data = bytearray(head)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with server.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = received(connection)
        assert not answer or 400 <= parsed(answer)[0] < 502, (data, answer)
    assert alive(server)


# -- slow clients (fault 57) ---------------------------------------------------------------------


def test_a_head_that_trickles_in_is_cut_off(server: Server) -> None:
    _drips(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b"x: y\r\n")


def test_a_body_that_trickles_in_is_cut_off(server: Server) -> None:
    _drips(server, _head(server, {"content-length": "60000"}), b" ")


def test_a_body_that_was_refused_may_not_trickle_on(server: Server) -> None:
    with server.connect() as connection:
        head = _head(server, {"content-length": "60000", "authorization": None})
        connection.sendall(head)
        connection.settimeout(0.05)
        answer = b""
        while True:
            try:
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                answer += piece
            except TimeoutError:
                connection.sendall(b" ")
            except ConnectionError:
                break
    assert answer.startswith(b"HTTP/1.1 401 ") and answer.count(b"HTTP/1.1") == 1


def test_a_connection_that_says_nothing_is_closed(server: Server) -> None:
    with server.connect() as connection:
        assert parsed(received(connection))[0] == 408


def test_a_client_that_does_not_read_is_cut_off(server: Server) -> None:
    """It sends requests until the server has no room left for the responses."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n\r\n"
        data = request % KEY.encode() * 100
        connection.settimeout(PATIENCE)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:  # ends when the server resets the connection
                connection.sendall(data)
    assert alive(server)


def test_slow_clients_do_not_keep_others_waiting() -> None:
    """200 that send byte by byte, one that is answered."""
    with Server("--receive-timeout", "600") as server:
        slow = [server.connect() for _ in range(200)]
        try:
            for connection in slow:
                connection.sendall(b"GET /health HTTP/1.1\r\n")
            assert alive(server)
            for connection in slow:
                connection.sendall(b"x: y\r\n")
            assert alive(server)
            for connection in slow:  # all are still held: it was answered before any was dropped
                connection.sendall(b"host: localhost\r\nconnection: close\r\n\r\n")
            assert all(parsed(received(connection))[0] == 200 for connection in slow)
        finally:
            for connection in slow:
                connection.close()


def test_connections_are_bounded() -> None:
    with Server("--receive-timeout", "60") as server:
        many = [server.connect() for _ in range(260)]
        try:
            refused: list[socket.socket] = []
            while len(refused) < 260 - 256:  # those that receive something without having asked
                quiet = [one for one in many if one not in refused]
                heard = select.select(quiet, [], [], PATIENCE)[0]
                assert heard
                refused += heard
            answers = [connection.recv(1 << 16) for connection in refused]
            assert all(b" 503 " in answer[:20] for answer in answers)
            assert all(b'"code":"overloaded"' in answer for answer in answers)
            others = [one for one in many if one not in refused]
            for connection in others:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert all(b" 200 " in one.recv(1 << 16)[:20] for one in others) and len(others) == 256
        finally:
            for connection in many:
                connection.close()
        assert alive(server)
        asks_in_a_crowd(server)


def asks_in_a_crowd(server: Server) -> None:
    """Of many connections in one turn of the loop, requests are read before any is refused."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        asking = [server.connect() for _ in range(20)]
        for connection in asking:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        silent = [server.connect() for _ in range(280)]
    finally:
        server.process.send_signal(signal.SIGCONT)
    try:
        assert all(b" 200 " in one.recv(1 << 16)[:20] for one in asking)
    finally:
        for connection in (*asking, *silent):
            connection.close()


def test_an_address_that_holds_most_connections_makes_room_among_its_own() -> None:
    """Other addresses are answered, and a connection that was answered before is kept."""
    with Server("--receive-timeout", "600") as server:
        begun = _head(server, {"content-length": "1000"})
        first, second = (_elsewhere(server) for _ in range(2))
        assert _answered(first)
        many = [server.connect() for _ in range(255)]
        try:
            for connection in many:
                connection.sendall(begun)
            assert _answered(first)
            for _ in range(20):  # they are refused, and the other addresses are not
                many.append(server.connect())
                many[-1].sendall(begun)
            assert _answered(second) and _answered(first)
        finally:
            first.close()
            second.close()
            for one in many:
                one.close()


def _elsewhere(server: Server) -> http.client.HTTPConnection:
    """Open a connection from another address of this machine."""
    place = ("127.0.0.2", 0)
    return http.client.HTTPConnection("127.0.0.1", server.port, PATIENCE, source_address=place)


def _answered(connection: http.client.HTTPConnection) -> bool:
    before = connection.sock
    connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    answer.read()
    return answer.status == 200 and before in (None, connection.sock)


# -- requests on one connection ------------------------------------------------------------------


def test_requests_that_follow_each_other_are_answered_in_turn(server: Server) -> None:
    data = json.dumps(ASK).encode()
    one = _head(server, {"content-length": str(len(data))}) + data
    last = _head(server, {"content-length": str(len(data)), "connection": "close"}) + data
    with server.connect() as connection:
        connection.sendall(one + one + last)
        assert received(connection).count(b"HTTP/1.1 200 OK") == 3


def test_rubbish_after_a_request_ends_only_its_own_connection(server: Server) -> None:
    body = {"messages": HELLO, "stream": True, **ENDLESS}
    data = json.dumps(body).encode()
    with server.connect() as connection:
        connection.sendall(_head(server, {"content-length": str(len(data))}) + data)
        assert b" 200 " in connection.recv(1 << 16)
        connection.sendall(b"rubbish\r\n\r\n")
        assert connection.recv(1 << 16)  # the stream continues
    assert alive(server)


# -- helpers -------------------------------------------------------------------------------------


def _head(server: Server, headers: dict[str, str | None]) -> bytes:
    fields: dict[str, str | None] = {
        "host": "localhost",
        "authorization": f"Bearer {KEY}",
        "content-type": "application/json",
    } | headers
    lines = [f"POST {CHAT} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def _drips(server: Server, begin: bytes, drop: bytes) -> None:
    """Send a byte at a time until the server answers; it must say 408 and close."""
    with server.connect() as connection:
        connection.sendall(begin)
        connection.settimeout(0.05)
        answer = b""
        while not answer:
            try:
                answer = connection.recv(1 << 16)
                assert answer, "closed without an answer"
            except TimeoutError:
                connection.sendall(drop)
        status, fields, body = parsed(answer)
        assert status == 408 and is_error(body) and fields["connection"] == "close"
