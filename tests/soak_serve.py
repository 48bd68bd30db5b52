"""Long-running mixed requests against `edge serve`: `make soak MINUTES=60`.

Four clients at a time ask for short and long answers, streams that are abandoned half-way, growing
conversations, repeated prompts, and requests that are refused. After every tenth of the time it
prints the server's memory, its CPU time per request and the latency of small requests, which
includes the load of the machine. Fails if the second half takes more than the first: 8 MB of
memory, or 1.5 times the CPU time.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import openai

from tests.server_process import Server

TEXT = "hello robot please count to seven and tell me why the sun is warm today é 🤖"
CLIENTS = 4
CHAT = "/v1/chat/completions"
MOST_MB, MOST_SLOWER = 8.0, 1.5


@dataclass
class Tally:
    """The clients' results since the last reading."""

    small_s: list[float] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def said(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(TEXT.split(), k=rng.randint(1, most)))


def talk(server: Server, seed: int, until: float, tally: Tally) -> None:
    """Run one client: requests drawn from `seed`, one after another."""
    rng, client = random.Random(seed), server.client()
    messages: list[Any] = []
    while time.monotonic() < until:
        kind = rng.choice(("small", "small", "small", "long", "left", "talk", "same", "refused"))
        try:
            took = asked(kind, server, client, rng, messages, tally)
            tally.tokens += took  # read after the request, or other clients' counts are lost
        except openai.APIStatusError as problem:
            if problem.status_code != 503:  # the queue was full, as reported
                tally.wrong.append(f"{kind}: {problem}")
        except Exception as problem:
            tally.wrong.append(f"{kind}: {problem!r}")
        tally.kinds[kind] = tally.kinds.get(kind, 0) + 1


def asked(
    kind: str, server: Server, client: openai.OpenAI, rng: random.Random, messages: list[Any],
    tally: Tally,
) -> int:  # fmt: skip
    """Make a request of this kind; return the number of tokens that the server reports."""
    if kind == "refused":
        body = rng.choice((b"{", b'{"messages": 1}', rng.randbytes(200), b'{"max_tokens": -1}'))
        status, _, _ = server.request("POST", CHAT, body)
        assert status in (400, 404, 422, 503), status
        return 0
    seed = rng.randrange(1 << 30)
    options: dict[str, Any] = {"model": "demo-draft", "max_tokens": 8, "seed": seed}
    prompt: Any = [{"role": "user", "content": said(rng, 12)}]
    if kind == "same":
        prompt, options["temperature"] = [{"role": "user", "content": "how are you?"}], 0
    elif kind == "long":
        options["max_tokens"] = 200
    elif kind == "talk":
        messages.append(prompt[0])
        prompt = messages
    if kind == "left":
        stream: Any = client.chat.completions.create(
            messages=prompt, stream=True, **options | {"max_tokens": 500}
        )
        for _, _ in zip(range(rng.randint(1, 4)), stream, strict=False):
            pass
        stream.close()
        return 0
    began = time.monotonic()
    answer: Any = client.chat.completions.create(messages=prompt, **options)
    if kind == "small":
        tally.small_s.append(time.monotonic() - began)
    elif kind == "talk":
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or " "})
        if len(messages) > 60:
            messages.clear()
    return answer.usage.total_tokens if answer.usage else 0


def resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) * 1024 / 1e6


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def soak(minutes: float) -> bool:
    """Return whether memory and CPU time stayed constant."""
    tally, rows, taken, asked = Tally(), [], 0.0, 0
    print(f"{'minute':>7} {'requests':>9} {'tokens':>9} {'small p50':>10} {'p99 ms':>8} "
          f"{'CPU ms':>7} {'MB':>8} {'files':>6}")  # fmt: skip
    with Server(bundle="demo-draft", anew=True) as server:
        until = time.monotonic() + 60 * minutes
        clients = [
            threading.Thread(target=talk, args=(server, seed, until, tally))
            for seed in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        pid = server.process.pid
        for part in range(1, 11):
            time.sleep(max(0.0, until - (10 - part) * 6 * minutes - time.monotonic()))
            small, tally.small_s = sorted(tally.small_s), []
            files = len(os.listdir(f"/proc/{pid}/fd"))
            small = small or [float("nan")]
            middle, last = statistics.median(small), small[int(len(small) * 0.99)]
            before, count = (taken, asked), sum(tally.kinds.values())
            taken, asked = cpu_s(pid), count
            each = 1e3 * (taken - before[0]) / max(1, asked - before[1])
            rows.append((each, resident_mb(pid)))
            print(f"{part * minutes / 10:7.1f} {count:9} {tally.tokens:9} "
                  f"{1e3 * middle:10.0f} {1e3 * last:8.0f} {each:7.2f} {rows[-1][1]:8.1f} "
                  f"{files:6}", flush=True)  # fmt: skip
        for client in clients:
            client.join()
    print(tally.kinds, tally.wrong[:10])
    grown = rows[-1][1] - rows[4][1]
    slower = statistics.median(r[0] for r in rows[5:]) / statistics.median(r[0] for r in rows[:5])
    print(f"second half: {grown:+.1f} MB, CPU time {slower:.2f} times the first's")
    return not tally.wrong and grown <= MOST_MB and slower <= MOST_SLOWER


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    sys.exit(not soak(parser.parse_args().minutes))
