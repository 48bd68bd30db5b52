"""Does the runtime reach what the formula promises? A drafter of known acceptance, that is free.

The target is first run plainly, greedily; then the drafter says again what it said, each token
right with a given probability. So acceptance is what it is said to be, c is 0 but for the look-up,
and what is left between formula and measurement is the runtime: accepting, going back, Python.

This needs an engine whose runs of several tokens give the bits of steps, as products in fp32 and of
8-bit integers do. With others random weights soon choose another token than the one known, and
nothing is accepted after that: `Simulated.same` says where.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import numpy as np

from edge.apps.measure.stopwatch import Say, in_turn, silent, without_collections
from edge.apps.profile.draft_costs import acceptance_rate, leviathan_speedup
from edge.apps.profile.draft_costs import measure as measure_costs
from edge.runtime.engine import Engine
from edge.runtime.generate import Context, Stepper
from edge.runtime.sampling import Sampler, SamplingParams
from edge.runtime.speculate.decode import Speculation, Speculative
from edge.runtime.speculate.draft import Draft, Drafter
from edge.runtime.speculate.policy import Fixed
from edge.runtime.speculate.shape import Shape

PROMPT = 16


class Replay(Drafter):
    """Drafts what the target is known to say, wrong now and then."""

    name = "simulated"
    nbytes = 0

    def __init__(self, prompt: int, answer: Sequence[int], acceptance: float, vocab: int) -> None:
        """`prompt`: its tokens; `answer`: all that will be said; `vocab`: ids there are."""
        self._prompt, self._answer = prompt, answer
        self._acceptance, self._vocab = acceptance, vocab
        self._rng = np.random.default_rng(0)

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        """See `Drafter.propose`."""
        start = len(tokens) - self._prompt + 1
        right = self._answer[start : start + shape.depth]
        said = tuple(
            token if self._rng.random() < self._acceptance else (token + 1) % self._vocab
            for token in right
        )
        return Draft(said, (None,) * len(said))


@dataclass(frozen=True)
class Simulated:
    """Chains of one length.

    Attributes:
        recipe: of the target.
        acceptance: α asked for, and `found`: that of the formula at the length measured.
        verify: what a verifying run costs, in steps.
        speedup: measured, the median over rounds; expected: by the formula, at the α found.
        promised: by the formula, at the α asked for.
        same: tokens that are those of plain decoding, from the first on, of `tokens`.
    """

    recipe: str
    depth: int
    acceptance: float
    acceptance_length: float
    found: float
    verify: float
    speedup: float
    expected: float
    promised: float
    same: int
    tokens: int

    @property
    def reached(self) -> float:
        """Share of what the formula expects."""
        return self.speedup / self.expected

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "reached": self.reached}


def simulate_drafts(
    engine: Engine, depths: Sequence[int], *, acceptance: float, tokens: int, rounds: int,
    recipe: str = "fp32", say: Say = silent,
) -> list[Simulated]:  # fmt: skip
    """Decode plainly and with drafts of each of `depths` tokens, in turn, after one round that
    warms up. `recipe`: what the engine runs, for people.
    """
    this = _Decoding(engine, tokens, max(depths))
    # beyond the end too, so that the last draft is as long as the first
    answer, _ = this.plain(tokens + max(depths))
    seconds: dict[int, list[float]] = {depth: [] for depth in (0, *depths)}
    last: dict[int, tuple[list[int], Speculation]] = {}
    with without_collections():
        for number in range(-1, rounds):
            which = "warming up" if number < 0 else f"{number + 1} of {rounds}"
            say(f"simulated drafts for {recipe}, {which}")
            for depth in in_turn(list(seconds), number):
                if depth:
                    drafter = Replay(PROMPT, answer, acceptance, engine.config.vocab_size)
                    said, spent, figures = this.drafted(depth, drafter)
                    last[depth] = said, figures
                else:
                    _, spent = this.plain(tokens)
                if number >= 0:
                    seconds[depth].append(spent)
        shapes = [(1,) * depth for depth in depths]
        costs = measure_costs(engine, None, shapes, 5 * rounds + 10)
    found = []
    for depth in depths:
        said, figures = last[depth]
        length = figures.acceptance_length or 1.0
        alpha, verify = acceptance_rate(length, depth), costs.prices[(1,) * depth].verify
        pairs = zip(seconds[0], seconds[depth], strict=True)
        found.append(
            Simulated(
                recipe=recipe,
                depth=depth,
                acceptance=acceptance,
                acceptance_length=length,
                found=alpha,
                verify=verify,
                speedup=median(plain / drafted for plain, drafted in pairs),
                expected=leviathan_speedup(alpha, depth, 0.0, verify),
                promised=leviathan_speedup(acceptance, depth, 0.0, verify),
                same=_same(answer, said),
                tokens=tokens,
            )
        )
    return found


class _Decoding:
    """Greedy answers to one prompt, by token ids."""

    def __init__(self, engine: Engine, tokens: int, depth: int) -> None:
        room = PROMPT + tokens + 2 * depth + 2 if engine.config.has_attention else None
        self._context = Context(engine, engine.new_state(window=depth + 1, capacity=room))
        self._count = tokens
        rng = np.random.default_rng(0)
        self._prompt = rng.integers(0, engine.config.vocab_size, PROMPT).tolist()
        self._vocab = engine.config.vocab_size

    def plain(self, count: int) -> tuple[list[int], float]:
        """(tokens, seconds from the first to the last)."""
        return self._timed(self._steps(), count)

    def drafted(self, depth: int, drafter: Drafter) -> tuple[list[int], float, Speculation]:
        decoding = Speculative(self._steps(), drafter, Fixed(Shape.of_chain(depth)))
        return *self._timed(decoding, self._count), decoding.figures

    def _steps(self) -> Stepper:
        sampler = Sampler(SamplingParams(temperature=0.0))
        return Stepper(self._context, sampler, self._vocab)

    def _timed(self, decoding: Stepper | Speculative, count: int) -> tuple[list[int], float]:
        context = self._context
        context.clear()
        logits = context.feed(self._prompt, lambda: False)
        assert logits is not None
        said: list[int] = []
        stamps: list[float] = []
        with closing(decoding.tokens(logits)) as tokens:
            for token in islice(tokens, count):
                said.append(token)
                stamps.append(time.perf_counter())
        return said, stamps[-1] - stamps[0]


def _same(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(b))
