"""CPU time of engines on one thread, for machines too busy to measure wall time:

    python -m tests.cpu_time ROUNDS BUNDLE:ENGINE...

Measures a step, a prompt of 256 tokens and a verified run of 4 in turn; reports medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import edge

PROMPT, STEPS, RUNS, DRAFT = 256, 8, 4, 4


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of all threads."""
    before = time.process_time()
    work()
    return time.process_time() - before


def measured(engine: Any, state: Any, ids: np.ndarray, chunk: int) -> tuple[float, float, float]:
    """Return the milliseconds of a step, of the prompt and of a run."""

    def prompt() -> None:
        for start in range(0, PROMPT, chunk):
            engine.run(ids[:, start : start + chunk], state, commit=True)

    def steps() -> None:
        for i in range(STEPS):
            engine.run(ids[:, i : i + 1], state)

    def runs() -> None:
        for i in range(RUNS):
            engine.run(ids[:, i : i + DRAFT], state, rows="all")

    state.clear()
    for each in (steps, runs):
        each()
    found = [1e3 * seconds(steps) / STEPS, 0.0, 1e3 * seconds(runs) / RUNS]
    state.clear()
    found[1] = 1e3 * seconds(prompt)
    return found[0], found[1], found[2]


def main(rounds: int, names: list[str]) -> None:
    """Print one line per engine."""
    peers = {}
    for name in names:
        bundle, _, engine = name.rpartition(":")
        model = edge.load(bundle, engine=engine, threads=1)
        peers[name] = (model, model.engine.new_state(window=DRAFT))
    ids = np.random.default_rng(0).integers(1, 256, (1, PROMPT))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, (model, state) in peers.items():
            found[name].append(measured(model.engine, state, ids, model.engine.chunk))
    for name, rows in found.items():
        step, prompt, run = (statistics.median(column) for column in zip(*rows, strict=True))
        rate = 1e3 * PROMPT / prompt
        print(f"{name}: step {step:.1f} ms, prefill {rate:.0f} tokens/s, run of 4 {run:.1f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
