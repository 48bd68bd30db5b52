"""What drafting costs and what it should gain: runs measured one by one, and the papers' formula.

Leviathan et al., arXiv 2211.17192, theorem 3.8: drafts of K tokens, each of which is accepted with
probability α whatever came before it, make decoding quicker by

    (1 - α^(K+1)) / ((1 - α) (K c + 1)),

c being what a step of the drafter costs in steps of the target. The numerator over 1 - α is the
expected tokens of a round (their equation 1). The 1 is the verifying run, which the paper takes to
cost as much as a step; here it is v, measured, so that K c + v is a round in steps.

Trees have no such α: SpecInfer (arXiv 2305.09781) and Mamba Drafters put the tokens measured in its
place, and so does `expected_speedup`. What is left between it and the speed-up measured is what
neither knows of: the runtime's own time, the drafter's reading of the prompt, and noise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import sub
from statistics import median
from typing import TypeVar

import numpy as np

from edge.apps.measure.stopwatch import in_turn, seconds
from edge.runtime.engine import Engine
from edge.runtime.speculate.shape import Shape
from edge.runtime.state import State

Branches = tuple[int, ...]
RoundKind = TypeVar("RoundKind")  # rounds that cost the same
CONTEXT = 16  # tokens read before anything is timed
Measure = Callable[[], float]


def expected_tokens(alpha: float, depth: int) -> float:
    """Tokens of a round with a chain of `depth`: (1 - α^(K+1)) / (1 - α), at α = 1 K + 1."""
    return sum(alpha**place for place in range(depth + 1))


def acceptance_rate(tokens: float, depth: int) -> float:
    """The α at which a chain of `depth` ≥ 1 has that many expected tokens, between 0 and 1.

    Not the share of drafted tokens that were accepted: those after
    the first refused one were never asked.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if expected_tokens(middle, depth) < tokens:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class Prices:
    """What rounds of one shape cost, in steps of the target.

    Attributes:
        draft: the drafter's runs, K c for a chain.
        verify: the target's run, v.
    """

    draft: float
    verify: float


def expected_speedup(
    tokens: int, steps: int, shapes: Mapping[RoundKind, int], prices: Mapping[RoundKind, Prices]
) -> float | None:
    """Tokens divided by their expected cost in plain steps.

    `tokens`: all that came of the rounds of `shapes`, how many of each kind, and of `steps` plain
    steps.
    With one chain and no plain step it is the formula at that acceptance. None without any tokens.
    """
    spent = float(steps)
    for kind, count in shapes.items():
        price = prices[kind]
        spent += count * (price.draft + price.verify)
    return tokens / spent if spent else None


# -- measured -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftCosts:
    """Medians, in seconds.

    Attributes:
        step: of the target.
        draft_step: of the drafter, one sequence; None where no model drafts.
        prices: shape → what drafting and verifying it take, in steps; verifying as in the middle of
            an answer, after a round that kept half of such a draft.
        rewind: shape → what going back to the middle of its draft takes, as a share of a step: of
            the going back and the step after it, for some engines put the work off until then, less
            the step after a run that is kept whole. Noise can make it negative.
    """

    step: float
    draft_step: float | None
    prices: dict[Branches, Prices]
    rewind: dict[Branches, float]

    def without_drafter(self) -> DraftCosts:
        """The same for drafts that cost nothing."""
        free = {branches: Prices(0.0, price.verify) for branches, price in self.prices.items()}
        return DraftCosts(self.step, None, free, self.rewind)


def measure(
    target: Engine, drafter: Engine | None, shapes: Collection[Branches], repetitions: int
) -> DraftCosts:
    """Each run `repetitions` times, in turn, after one that warms up."""
    named = {branches: Shape(branches) for branches in shapes}
    runs: dict[object, Measure] = {"step": _Bench(target, Shape()).verify}
    for branches, shape in named.items():
        bench = _Bench(target, shape)
        runs["verify", branches] = bench.verify
        runs["back", branches] = bench.step_after_going_back
        runs["on", branches] = bench.step_after_all
    widths = {width for shape in named.values() for width in _widths(shape)} | {1}
    if drafter is not None:
        runs |= {("draft", width): _Batch(drafter, width).step for width in widths}
    found: dict[object, list[float]] = {name: [] for name in runs}
    for number in range(-1, repetitions):
        for name in in_turn(list(runs), number):
            spent = runs[name]()
            if number >= 0:
                found[name].append(spent)
    middle = {name: median(values) for name, values in found.items()}
    step = middle["step"]

    def price(branches: Branches, shape: Shape) -> Prices:
        drafts = sum(middle["draft", width] for width in _widths(shape)) if drafter else 0.0
        return Prices(drafts / step, middle["verify", branches] / step)

    return DraftCosts(
        step=step,
        draft_step=middle["draft", 1] if drafter else None,
        prices={branches: price(branches, shape) for branches, shape in named.items()},
        rewind={
            branches: median(map(sub, found["back", branches], found["on", branches])) / step
            for branches in named
        },
    )


def _widths(shape: Shape) -> tuple[int, ...]:
    """Sequences of each of a drafter's runs: one after the root, then one for every node of a depth
    but the last.
    """
    return (1, *shape.widths[:-1])


class _Bench:
    """A state of the target that comes back to the same place before every measurement."""

    def __init__(self, engine: Engine, shape: Shape) -> None:
        count = shape.nodes + 1
        room = CONTEXT + 2 * count + 2
        self._engine = engine
        self._state = engine.new_state(
            window=max(8, count), capacity=room if engine.config.has_attention else None
        )
        self._tokens = _ids(engine, 1, count)
        self._parents = None if shape.chain else _parents(shape)
        _read(engine, self._state)
        self._place = self._state.snapshot()

    def verify(self) -> float:
        """Seconds of the run, after one of the same kind of which half was kept: what an engine
        puts off until the next run belongs to every round.
        """
        self._state.restore(self._place)
        self._run()
        self._keep((len(self._tokens[0]) - 1) // 2)
        spent = seconds(self._run)
        self._keep(len(self._tokens[0]) - 1)
        return spent

    def step_after_going_back(self) -> float:
        """Seconds of rewinding a chain by the later half, or of selecting a node in the middle of
        a tree, and of a step then.
        """
        return self._step_after((len(self._tokens[0]) - 1) // 2)

    def step_after_all(self) -> float:
        """The same when the last token is kept."""
        return self._step_after(len(self._tokens[0]) - 1)

    def _step_after(self, node: int) -> float:
        self._state.restore(self._place)
        self._run()

        def step() -> None:
            self._keep(node)
            self._engine.run(self._tokens[:, :1], self._state)

        return seconds(step)

    def _run(self) -> None:
        self._engine.run(self._tokens, self._state, parents=self._parents, rows="all")

    def _keep(self, node: int) -> None:
        """Continue from a token of the run, 0 the first."""
        if self._parents is not None:
            self._state.select(node)
        elif unwanted := len(self._tokens[0]) - 1 - node:
            self._state.rewind(unwanted)


class _Batch:
    """A batch of sequences of the drafter, which step together."""

    def __init__(self, engine: Engine, width: int) -> None:
        self._engine = engine
        room = CONTEXT + 2 if engine.config.has_attention else None
        self._state = engine.new_state(batch=width, capacity=room)
        self._token = _ids(engine, width, 1)
        _read(engine, self._state)
        self._place = self._state.snapshot()

    def step(self) -> float:
        self._state.restore(self._place)
        return seconds(lambda: self._engine.run(self._token, self._state))


def _read(engine: Engine, state: State) -> None:
    tokens = _ids(engine, state.batch, CONTEXT)
    for start in range(0, CONTEXT, engine.chunk):
        engine.run(tokens[:, start : start + engine.chunk], state, commit=True)


def _ids(engine: Engine, batch: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    rng = np.random.default_rng(0)
    return rng.integers(0, engine.config.vocab_size, (batch, count), dtype=np.int64)


def _parents(shape: Shape) -> tuple[int, ...]:
    """Parents of the token before a tree, then of its nodes, depth by depth."""
    parents, level = [-1], [0]
    for count in shape.branches:
        below = [parent for parent in level for _ in range(count)]
        level = list(range(len(parents), len(parents) + len(below)))
        parents += below
    return tuple(parents)
