"""Several states stepped in one run: each gets the bits of its own step, whatever the others do."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from edge.errors import ContextFullError, EdgeError, EngineError, InputError, StateError
from edge.plugins.cpu import library
from edge.runtime.cpu.engine import CpuEngine
from edge.runtime.cuda.state import DeviceState
from edge.runtime.engine import JointStep, Stepped
from tests import on_device, quantized_models
from tests.cuda.models import tiny_engine

pytestmark = pytest.mark.skipif(
    library.path() is None,
    reason="needs the kernels for CPUs (run make test where there is a C++ compiler)",
)
V = quantized_models.V
CAPACITY = 64


def engine_of(name: str, quant: str) -> CpuEngine:
    with on_device.running(library.instruction_sets()[-1]):
        engine = tiny_engine(name, quant)
    assert isinstance(engine, CpuEngine)
    return engine


class Twins:
    """A state that is stepped with others, and one that is stepped alone."""

    def __init__(self, engine: CpuEngine, window: int, prompt: np.ndarray) -> None:
        self.engine = engine
        self.joined, self.alone = (
            engine.new_state(window=window, capacity=CAPACITY) for _ in range(2)
        )
        for state in self.both:
            engine.run(prompt, state, commit=True)

    @property
    def both(self) -> tuple[DeviceState, DeviceState]:
        return self.joined, self.alone

    def check(self, step: JointStep, found: Stepped) -> None:
        """Check that a result equals that of a step alone."""
        token = np.asarray([[step.token]])
        if step.greedy:
            assert found == self.engine.run_greedy(token, self.alone)[0]
        else:
            assert isinstance(found, np.ndarray)
            assert found.tobytes() == self.engine.run(token, self.alone).tobytes()

    def meddle(self, rng: random.Random) -> None:
        """Do another operation on both."""
        verb = rng.choice(["rewind", "restore", "fork", "run", "clear"])
        for index, state in enumerate(self.both):
            if verb == "rewind":
                state.rewind(min(1, state.reach))
            elif verb == "restore":
                state.restore(state.snapshot())
            elif verb == "clear":
                state.clear()
            elif verb == "run":
                self.engine.run(np.asarray([[3, 1, 2]]), state, commit=True)
            elif index == 0:
                self.joined = state.fork()
            else:
                self.alone = state.fork()

    def same(self) -> None:
        assert self.joined.ledger == self.alone.ledger
        ours, theirs = self.joined.arrays(), self.alone.arrays()
        for name, array in ours.items():
            assert array.tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize(
    ("name", "quant"),
    [("mamba1", "w4"), ("mamba2 groups", "fp16"), ("experts", "w8"), ("all", "w8a8"),
     ("all", "fp32")],
)  # fmt: skip
def test_each_gets_the_bits_of_its_own_step(name: str, quant: str) -> None:
    """At other positions and windows; they join and leave, rewind, fork and read in between."""
    engine, rng = engine_of(name, quant), random.Random(1)
    prompts = [np.random.default_rng(i).integers(0, V, (1, 1 + 5 * i)) for i in range(5)]
    every = [Twins(engine, 1 + i % 3, prompt) for i, prompt in enumerate(prompts)]
    for round_ in range(8):
        some = rng.sample(every, rng.choice([1, 2, 3, 5]))
        steps = [JointStep(rng.randrange(V), t.joined, greedy=rng.random() < 0.3) for t in some]
        for twins, step, found in zip(some, steps, engine.step_jointly(steps), strict=True):
            twins.check(step, found)
        if round_ % 2:
            rng.choice(every).meddle(rng)
    for twins in every:
        twins.same()
    engine.exclusive.device.wait()  # guard zones


def test_what_is_wrong_with_one_is_its_own() -> None:
    engine, other = engine_of("all", "fp32"), engine_of("mamba1", "fp32")
    good = [Twins(engine, 2, np.asarray([[i, 7]])) for i in (1, 2)]
    new = engine.new_state
    full, several, waiting, spoilt = new(capacity=1), new(batch=2), new(), new()
    engine.run(np.asarray([[1]]), full)
    engine.run(np.asarray([[1, 2]]), waiting, parents=[-1, -1])
    engine.run(np.asarray([[1]]), spoilt)
    spoilt.adopt(
        {n: np.full_like(a, np.nan) for n, a in spoilt.snapshot().recurrent.items()},
        spoilt.snapshot().caches, 1, {},
    )  # fmt: skip
    wrong: Sequence[tuple[JointStep, type[EdgeError], str]] = [
        (JointStep(V, new()), InputError, "token ids"),
        (JointStep(1, full), ContextFullError, "do not fit"),
        (JointStep(1, several), InputError, "1 sequences, the state has 2"),
        (JointStep(1, waiting), StateError, "no node of it selected"),
        (JointStep(1, other.new_state()), StateError, "another engine"),
        (JointStep(1, spoilt), EngineError, "not finite"),
        (JointStep(1, spoilt, greedy=True), EngineError, "in use"),
    ]
    before = spoilt.ledger
    steps = [JointStep(4, good[0].joined), *(step for step, *_ in wrong)]
    steps.append(JointStep(5, good[1].joined, greedy=True))
    found = engine.step_jointly(steps)
    for (_, kind, message), problem in zip(wrong, found[1:-1], strict=True):
        assert isinstance(problem, kind) and message in str(problem)
    assert spoilt.ledger == before
    for twins, index in ((good[0], 0), (good[1], -1)):
        twins.check(steps[index], found[index])
        twins.same()
    assert isinstance(engine.step_jointly([JointStep(1, spoilt, greedy=True)])[0], EngineError)
    for steps in ([], [JointStep(1, new())] * 17):
        with pytest.raises(InputError, match="steps"):
            engine.step_jointly(steps)
