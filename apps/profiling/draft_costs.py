"""What the runs of a round cost, each measured alone and in turn with the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from edge.apps.profiling.measure import in_turn
from edge.apps.profiling.theory import Branches, Prices
from edge.runtime.engine import Engine
from edge.runtime.speculate.shape import Shape
from edge.runtime.state import State

CONTEXT = 16  # tokens read before anything is timed
Measure = Callable[[], float]


@dataclass(frozen=True)
class Costs:
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

    def without_drafter(self) -> Costs:
        """The same for drafts that cost nothing."""
        free = {branches: Prices(0.0, price.verify) for branches, price in self.prices.items()}
        return Costs(self.step, None, free, self.rewind)


def measure(
    target: Engine, drafter: Engine | None, shapes: Collection[Branches], repetitions: int
) -> Costs:
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
            seconds = runs[name]()
            if number >= 0:
                found[name].append(seconds)
    middle = {name: median(values) for name, values in found.items()}
    step = middle["step"]

    def price(branches: Branches, shape: Shape) -> Prices:
        drafts = sum(middle["draft", width] for width in _widths(shape)) if drafter else 0.0
        return Prices(drafts / step, middle["verify", branches] / step)

    return Costs(
        step=step,
        draft_step=middle["draft", 1] if drafter else None,
        prices={branches: price(branches, shape) for branches, shape in named.items()},
        rewind={
            branches: _paired(found["back", branches], found["on", branches]) / step
            for branches in named
        },
    )


def _widths(shape: Shape) -> tuple[int, ...]:
    """Sequences of each of a drafter's runs: one after the root, then one for every node of a depth
    but the last.
    """
    return (1, *shape.widths[:-1])


def _paired(some: Sequence[float], others: Sequence[float]) -> float:
    return median(a - b for a, b in zip(some, others, strict=True))


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
        began = time.perf_counter()
        self._run()
        seconds = time.perf_counter() - began
        self._keep(len(self._tokens[0]) - 1)
        return seconds

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
        began = time.perf_counter()
        self._keep(node)
        self._engine.run(self._tokens[:, :1], self._state)
        return time.perf_counter() - began

    def _run(self) -> None:
        self._engine.run(self._tokens, self._state, parents=self._parents, rows="all")

    def _keep(self, node: int) -> None:
        """Go on from a token of the run, 0 the first."""
        if self._parents is not None:
            self._state.select(node)
        elif unwanted := len(self._tokens[0]) - 1 - node:
            self._state.rewind(unwanted)


class _Batch:
    """So many sequences of the drafter, which step together."""

    def __init__(self, engine: Engine, width: int) -> None:
        self._engine = engine
        room = CONTEXT + 2 if engine.config.has_attention else None
        self._state = engine.new_state(batch=width, capacity=room)
        self._token = _ids(engine, width, 1)
        _read(engine, self._state)
        self._place = self._state.snapshot()

    def step(self) -> float:
        self._state.restore(self._place)
        began = time.perf_counter()
        self._engine.run(self._token, self._state)
        return time.perf_counter() - began


def _read(engine: Engine, state: State) -> None:
    tokens = _ids(engine, state.batch, CONTEXT)
    for start in range(0, CONTEXT, engine.chunk):
        engine.run(tokens[:, start : start + engine.chunk], state, commit=True)


def _ids(engine: Engine, batch: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    rng = np.random.default_rng(0)
    return rng.integers(0, engine.config.vocab_size, (batch, count), dtype=np.int64)


def _parents(shape: Shape) -> tuple[int, ...]:
    """Of the token before a tree, then of its nodes, depth by depth."""
    parents, level = [-1], [0]
    for count in shape.branches:
        below = [parent for parent in level for _ in range(count)]
        level = list(range(len(parents), len(parents) + len(below)))
        parents += below
    return tuple(parents)
