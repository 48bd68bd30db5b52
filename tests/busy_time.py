"""Steps of the `cpu` engine beside four busy processes: `python -m tests.busy_time BUNDLE`.

Prints the median and the 90th percentile of milliseconds of a step on one and two threads, by the
clock, alternately without and with the busy processes.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import edge

BUSY, STEPS, ROUNDS, WARM = 4, 150, 3, 10


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy(count: int) -> Iterator[None]:
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def steps_ms(model: edge.Model) -> list[float]:
    state, token, found = model.engine.new_state(), np.zeros((1, 1), np.int64), []
    for _ in range(STEPS + WARM):
        began = time.perf_counter()
        model.engine.run(token, state)
        found.append(1e3 * (time.perf_counter() - began))
    return found[WARM:]


def main(bundle: str) -> None:
    models = {threads: edge.load(bundle, engine="cpu", threads=threads) for threads in (1, 2)}
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(ROUNDS):
        for count in (0, BUSY):
            with busy(count):
                for threads, model in models.items():
                    times.setdefault((threads, count), []).extend(steps_ms(model))
    for (threads, count), found in sorted(times.items()):
        median, late = np.percentile(found, (50, 90))
        print(f"{threads} threads, {count} busy processes: {median:.2f}, p90 {late:.2f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
