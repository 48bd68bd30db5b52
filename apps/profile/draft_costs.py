"""Cost and expected gain of drafting, from single runs and the papers' formula.

Leviathan et al., arXiv 2211.17192, theorem 3.8: with drafts of K tokens, each accepted
independently with probability α, decoding is faster by

    (1 - α^(K+1)) / ((1 - α) (K c + 1)),

where c is the cost of a drafter step in target steps. The numerator over 1 - α is the expected
number of tokens of a round (their equation 1). The 1 is the verify run, which the paper assumes to
cost one step. Here it is the measured v, so that a round costs K c + v steps.

Trees have no such α. SpecInfer (arXiv 2305.09781), Mamba Drafters and `expected_speedup` use the
measured number of tokens instead. The difference from the measured speedup is the runtime's own
time, the drafter's reading of the prompt, and noise.
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
CONTEXT = 16  # tokens read before timing begins
Measure = Callable[[], float]


def expected_tokens(alpha: float, depth: int) -> float:
    """Return the expected tokens of a round with a chain of K = `depth`.

    They are (1 - α^(K+1)) / (1 - α), or K + 1 at α = 1.
    """
    return sum(alpha**k for k in range(depth + 1))


def acceptance_rate(tokens: float, depth: int) -> float:
    """Return the α in [0, 1] at which a chain of `depth` ≥ 1 has `tokens` expected tokens.

    It is not the share of drafted tokens that were accepted, because tokens after the first
    rejected one are never checked.
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
    """Cost of a round of one shape, in steps of the target.

    Attributes:
        draft: cost of the drafter's runs, K c for a chain.
        verify: cost of the target's verify run, v.
    """

    draft: float
    verify: float


def expected_speedup(
    tokens: int, steps: int, shapes: Mapping[RoundKind, int], prices: Mapping[RoundKind, Prices]
) -> float | None:
    """Return tokens divided by their expected cost in plain steps; None without any cost.

    With one chain and no plain step, it is the formula at the measured acceptance.

    Args:
        tokens: number of tokens from all rounds and plain steps.
        steps: number of plain steps.
        shapes: number of rounds of each kind.
        prices: cost of a round of each kind.
    """
    cost = float(steps)
    for kind, count in shapes.items():
        price = prices[kind]
        cost += count * (price.draft + price.verify)
    return tokens / cost if cost else None


# -- measured -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftCosts:
    """Median costs.

    Attributes:
        step: seconds of a step of the target.
        draft_step: seconds of a step of the drafter with one sequence; None if no model drafts.
        prices: cost of a round by shape. Verifying is measured after a round that kept half of
            such a draft, as in the middle of an answer.
        rewind: cost of rewinding to the middle of a draft by shape, as a share of a step. It is the
            rewind and the step after it, to which some engines defer the work, less the step after
            a run that is kept whole. Noise can make it negative.
    """

    step: float
    draft_step: float | None
    prices: dict[Branches, Prices]
    rewind: dict[Branches, float]

    def without_drafter(self) -> DraftCosts:
        """Return the same costs with free drafts."""
        free = {branches: Prices(0.0, price.verify) for branches, price in self.prices.items()}
        return DraftCosts(self.step, None, free, self.rewind)


def measure(
    target: Engine, drafter: Engine | None, shapes: Collection[Branches], repetitions: int
) -> DraftCosts:
    """Measure each run `repetitions` times, in turn, after one warm-up."""
    by_branches = {branches: Shape(branches) for branches in shapes}
    runs: dict[object, Measure] = {"step": _TargetBench(target, Shape()).verify}
    for branches, shape in by_branches.items():
        bench = _TargetBench(target, shape)
        runs["verify", branches] = bench.verify
        runs["back", branches] = bench.step_after_going_back
        runs["on", branches] = bench.step_after_all
    widths = {width for shape in by_branches.values() for width in _widths(shape)} | {1}
    if drafter is not None:
        runs |= {("draft", width): _DrafterBatch(drafter, width).step for width in widths}
    samples: dict[object, list[float]] = {name: [] for name in runs}
    for number in range(-1, repetitions):
        for name in in_turn(list(runs), number):
            spent = runs[name]()
            if number >= 0:
                samples[name].append(spent)
    medians = {name: median(values) for name, values in samples.items()}
    step = medians["step"]

    def price(branches: Branches, shape: Shape) -> Prices:
        drafts = sum(medians["draft", width] for width in _widths(shape)) if drafter else 0.0
        return Prices(drafts / step, medians["verify", branches] / step)

    return DraftCosts(
        step=step,
        draft_step=medians["draft", 1] if drafter else None,
        prices={branches: price(branches, shape) for branches, shape in by_branches.items()},
        rewind={
            branches: median(map(sub, samples["back", branches], samples["on", branches])) / step
            for branches in by_branches
        },
    )


def _widths(shape: Shape) -> tuple[int, ...]:
    """Return the batch size of each of a drafter's runs.

    The first run continues from the root, each later one from the nodes of a depth except the last.
    """
    return (1, *shape.widths[:-1])


class _TargetBench:
    """A state of the target that is restored to the same place before every measurement."""

    def __init__(self, engine: Engine, shape: Shape) -> None:
        count = shape.nodes + 1
        room = CONTEXT + 2 * count + 2
        self._engine = engine
        self._state = engine.new_state(
            window=max(8, count), capacity=room if engine.config.has_attention else None
        )
        self._tokens = _random_ids(engine, 1, count)
        self._parents = None if shape.chain else parent_rows(shape)
        _read_context(engine, self._state)
        self._snapshot = self._state.snapshot()

    def verify(self) -> float:
        """Return seconds of a verify run after one whose second half was rewound.

        Work that an engine defers to the next run is thus included.
        """
        self._state.restore(self._snapshot)
        self._run()
        self._keep((len(self._tokens[0]) - 1) // 2)
        spent = seconds(self._run)
        self._keep(len(self._tokens[0]) - 1)
        return spent

    def step_after_going_back(self) -> float:
        """Return seconds of going back to mid-draft, by rewind or tree select, and a step."""
        return self._step_after((len(self._tokens[0]) - 1) // 2)

    def step_after_all(self) -> float:
        """Return seconds of a step after a run whose last token is kept."""
        return self._step_after(len(self._tokens[0]) - 1)

    def _step_after(self, node: int) -> float:
        self._state.restore(self._snapshot)
        self._run()

        def step() -> None:
            self._keep(node)
            self._engine.run(self._tokens[:, :1], self._state)

        return seconds(step)

    def _run(self) -> None:
        self._engine.run(self._tokens, self._state, parents=self._parents, rows="all")

    def _keep(self, node: int) -> None:
        """Continue from a token of the run, counted from 0."""
        if self._parents is not None:
            self._state.select(node)
        elif unwanted := len(self._tokens[0]) - 1 - node:
            self._state.rewind(unwanted)


class _DrafterBatch:
    """A batch of drafter sequences that step together."""

    def __init__(self, engine: Engine, width: int) -> None:
        self._engine = engine
        room = CONTEXT + 2 if engine.config.has_attention else None
        self._state = engine.new_state(batch=width, capacity=room)
        self._token = _random_ids(engine, width, 1)
        _read_context(engine, self._state)
        self._snapshot = self._state.snapshot()

    def step(self) -> float:
        self._state.restore(self._snapshot)
        return seconds(lambda: self._engine.run(self._token, self._state))


def _read_context(engine: Engine, state: State) -> None:
    tokens = _random_ids(engine, state.batch, CONTEXT)
    for start in range(0, CONTEXT, engine.chunk):
        engine.run(tokens[:, start : start + engine.chunk], state, commit=True)


def _random_ids(
    engine: Engine, batch: int, count: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    rng = np.random.default_rng(0)
    return rng.integers(0, engine.config.vocab_size, (batch, count), dtype=np.int64)


def parent_rows(shape: Shape) -> tuple[int, ...]:
    """Return the parents of the token before a tree, then of its nodes, depth by depth."""
    parents, level = [-1], [0]
    for count in shape.branches:
        below = [parent for parent in level for _ in range(count)]
        level = list(range(len(parents), len(parents) + len(below)))
        parents += below
    return tuple(parents)
