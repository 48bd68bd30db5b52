"""Good clients of `edge serve` beside bad ones: `python -m tests.crowd_serve`.

Each client has its own address on the loopback device. Good clients ask for eight tokens, wait, and
ask again. Bad clients say nothing, send a head or a body one byte at a time, leave streams unread,
send something other than HTTP, omit the key, never finish a large body, or disconnect in the middle
of a request. Prints the latencies of the good clients, alternately without and with the bad ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.server_process import Server

CHAT = "/v1/chat/completions"
MODEL = "demo-draft"
PATIENCE = 60.0
PAUSE = 0.5  # seconds between trickled bytes

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Crowd:
    """Clients of a server until the monotonic time `until`, and the results of the good ones."""

    port: int
    key: str
    until: float
    latencies: list[float] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)

    async def connect(self, place: str) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(place, 0))

    def head(self, length: int, key: str | None = None, more: str = "") -> bytes:
        return (
            f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key or self.key}\r\ncontent-length: {length}\r\n{more}\r\n"
        ).encode()

    def request(self, text: str, tokens: int, more: str = "", **options: Any) -> bytes:
        talk = [{"role": "user", "content": text}]
        asked = {"model": MODEL, "max_tokens": tokens, "messages": talk} | options
        body = json.dumps(asked).encode()
        return self.head(len(body), more=more) + body

    async def good(self, number: int) -> None:
        rng = random.Random(number)
        await asyncio.sleep(rng.uniform(0, 2))  # 20 at once would wait for each other
        while time.monotonic() < self.until:
            began = time.monotonic()
            try:
                reader, writer = await self.connect(f"127.2.0.{number + 1}")
                text = f"hello robot {rng.random()}"
                writer.write(self.request(text, 8, "connection: close\r\n", seed=number))
                answer = await asyncio.wait_for(reader.read(), PATIENCE)
                writer.close()
                status = answer[9:12].decode() or "closed"
            except (OSError, asyncio.TimeoutError) as problem:
                status = type(problem).__name__
            self.ended[status] += 1
            if status == "200":
                self.latencies.append(time.monotonic() - began)
            await asyncio.sleep(rng.uniform(0.2, 0.6))

    async def bad(self, number: int) -> None:
        act = BAD[number % len(BAD)]
        rng = random.Random(number)
        while time.monotonic() < self.until:
            try:
                streams = await self.connect(f"127.1.{number // 250}.{number % 250 + 1}")
                left = max(0.1, self.until - time.monotonic())
                await asyncio.wait_for(act(self, *streams, rng), left)
                streams[1].transport.abort()
            except (OSError, asyncio.TimeoutError):
                pass
            await asyncio.sleep(0.2)


async def silent(crowd: Crowd, reader: Any, writer: Any, rng: random.Random) -> None:
    await reader.read()


async def _trickle(reader: Any, writer: Any, data: bytes) -> None:
    for value in data:
        writer.write(bytes((value,)))
        await writer.drain()
        await asyncio.sleep(PAUSE)
        if reader.at_eof():
            return


async def slow_head(crowd: Crowd, reader: Any, writer: Any, rng: random.Random) -> None:
    await _trickle(reader, writer, crowd.head(9, more="x: y\r\n" * 1000))


async def slow_body(crowd: Crowd, reader: Any, writer: Any, rng: random.Random) -> None:
    writer.write(crowd.head(5000))
    await _trickle(reader, writer, b" " * 5000)


async def unread(crowd: Crowd, reader: Any, writer: Any, rng: random.Random) -> None:
    writer.write(crowd.request("tell me all", 2000, stream=True))
    await writer.drain()
    writer.transport.pause_reading()
    await asyncio.sleep(10)


async def no_http(crowd: Crowd, reader: Any, writer: Any, rng: random.Random) -> None:
    writer.write(rng.randbytes(3000))
    await asyncio.wait_for(reader.read(), 5)


async def no_key(crowd: Crowd, reader: Any, writer: Any, rng: random.Random) -> None:
    writer.write(crowd.head(2, "wrong") + b"{}")
    await asyncio.wait_for(reader.read(), 5)


async def large_body(crowd: Crowd, reader: Any, writer: Any, rng: random.Random) -> None:
    writer.write(crowd.head(900_000) + b'{"messages": "' + b"word " * 100_000)
    await reader.read()


async def idle(crowd: Crowd, reader: Any, writer: Any, rng: random.Random) -> None:
    writer.write(crowd.request("x", 1))
    await reader.read()


async def half(crowd: Crowd, reader: Any, writer: Any, rng: random.Random) -> None:
    writer.write(crowd.request("x", 500)[:-10])
    await writer.drain()
    await asyncio.sleep(1)


BAD = (silent, slow_head, slow_body, unread, no_http, no_key, large_body, idle, half)


async def run(server: Server, seconds: float, good: int, bad: int) -> Crowd:
    crowd = Crowd(server.port, server.key, time.monotonic() + seconds)
    await asyncio.gather(*map(crowd.good, range(good)), *map(crowd.bad, range(bad)))
    return crowd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of four runs")
    parser.add_argument("--good", type=int, default=20)
    parser.add_argument("--bad", type=int, default=280)
    asked = parser.parse_args()
    print(f"{'bad':>4} {'answers':>8} {'p50 ms':>7} {'p90 ms':>7} {'p99 ms':>7} {'load':>5}  ended")
    for bad in (0, asked.bad) * 2:
        with Server(bundle=MODEL, anew=True) as server:
            crowd = asyncio.run(run(server, asked.seconds, asked.good, bad))
        found = sorted(crowd.latencies) or [float("nan")]
        shown = [1e3 * found[int(len(found) * share)] for share in (0.5, 0.9, 0.99)]
        told = "".join(f"{value:8.0f}" for value in shown)
        load = os.getloadavg()[0]
        print(f"{bad:4} {len(found):8}{told} {load:5.1f}  {dict(crowd.ended)}", flush=True)


if __name__ == "__main__":
    main()
