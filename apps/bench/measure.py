"""Times peers in turn: figure by figure, every peer once a round, so that all see the same machine.

What one round gives is a median over a few calls; what is reported is the median over rounds. A
ratio is taken within each round first: what slows a round down slows both of its sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from edge.apps.bench.peers import RUN, Peer, Tokens

Figure = Literal["decode", "prefill", "run"]
FIGURES: tuple[Figure, ...] = ("decode", "prefill", "run")

PAUSE = 0.05  # seconds in which the last peer's idle threads stop spinning
BUDGET = 1.0  # seconds after which a turn neither warms up nor samples further
WARM = {"decode": 3, "prefill": 1, "run": 2}
CALLS = {"decode": 24, "prefill": 3, "run": 8}


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, a median for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.rounds), max(self.rounds)

    def over(self, other: Timing) -> float:
        """How many times as long as `other`: the median over rounds of their ratio."""
        return median(a / b for a, b in zip(self.rounds, other.rounds, strict=True))

    def to_dict(self) -> dict[str, object]:
        low, high = self.spread
        return {"median_ms": self.median, "min_ms": low, "max_ms": high, "rounds_ms": self.rounds}


Timings = dict[str, dict[Figure, Timing]]


def measure(
    peers: Sequence[Peer],
    tokens: Tokens,
    rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> Timings:
    """Time every figure of every peer `rounds` times; prefill takes all of `tokens`."""
    taken: dict[str, dict[Figure, list[float]]] = {
        peer.name: {figure: [] for figure in FIGURES} for peer in peers
    }
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for figure in FIGURES:
            # another one begins each round, so that no peer always follows the same one
            for offset in range(len(peers)):
                peer = peers[(number + offset) % len(peers)]
                time.sleep(PAUSE)
                taken[peer.name][figure].append(1e3 * median(turn(peer, figure, tokens)))
    return {name: _timings(figures) for name, figures in taken.items()}


def turn(peer: Peer, figure: Figure, tokens: Tokens) -> list[float]:
    """Seconds of each call of one turn, after some that warm up."""
    call = caller(peer, figure, tokens)
    _repeat(call, WARM[figure])
    return _repeat(call, CALLS[figure])


def _repeat(call: Callable[[], object], most: int) -> list[float]:
    """Seconds of each of at least one and at most `most` calls; none begins after the budget."""
    taken: list[float] = []
    while len(taken) < most and sum(taken) < BUDGET:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return taken


def caller(peer: Peer, figure: Figure, tokens: Tokens) -> Callable[[], object]:
    """What is timed: one call of the figure, from a state that has seen some tokens."""
    if figure == "prefill":
        return lambda: peer.prefill(tokens)
    peer.prefill(tokens[:RUN])
    if figure == "decode":
        token = int(tokens[0])
        return lambda: peer.step(token)
    few = tokens[:RUN]
    return lambda: peer.run(few)


def _timings(figures: Mapping[Figure, Sequence[float]]) -> dict[Figure, Timing]:
    return {figure: Timing(tuple(rounds)) for figure, rounds in figures.items()}
