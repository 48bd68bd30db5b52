"""Greedy tokens found on the device equal those of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError
from edge.runtime.context import Context
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.generate import Stepper
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Sampler, new_rng
from tests.cuda.models import engines, poison, tokens


@pytest.mark.parametrize(("name", "quant"), [("mamba1", "fp32"), ("mamba2", "w8a8")])
@pytest.mark.parametrize("batch", [1, 2])
def test_ids_are_those_of_the_largest_logits(name: str, quant: str, batch: int) -> None:
    engine = engines(name, quant).cuda
    assert engine.finds_argmax
    a, b = (engine.new_state(batch=batch, window=4) for _ in range(2))
    words = tokens(6, batch)
    for start, count in ((0, 1), (1, 3), (4, 1), (5, 1)):
        poison(engine, a)
        piece = words[:, start : start + count]
        expected = engine.run(piece, b)[:, -1].argmax(-1)
        np.testing.assert_array_equal(engine.run_greedy(piece, a), expected)
        assert a.position == b.position
    for found, wanted in zip(a.arrays().values(), b.arrays().values(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_nan_is_told_and_the_state_stays_where_it_was() -> None:
    engine = engines("mamba1", "fp32").cuda
    state = engine.new_state(window=4)
    engine.run_greedy(tokens(2), state)
    with engine.exclusive as device:
        device.fill(state.recurrent, 0, state.recurrent.nbytes, 0xFF)
    with pytest.raises(EngineError, match="not finite"):
        engine.run_greedy(tokens(1), state)
    assert state.position == 2


def _stepper(engine: CudaEngine, vocab_size: int) -> Stepper:
    """Return a greedy stepper over the ids below `vocab_size`."""
    context = Context(engine, engine.new_state(window=4))
    context.advance([3, 5])
    sampler = Sampler(SamplingParams(temperature=0.0), new_rng(None))
    return Stepper(context, sampler, vocab_size)


def test_padding_ids_are_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("mamba1", "fp32").cuda
    plain = _stepper(engine, 1 << 30).context
    logits = plain.step(7).copy()
    best = int(logits.argmax())
    runs: list[str] = []
    for name in ("run", "run_greedy"):
        monkeypatch.setattr(CudaEngine, name, _recorded(runs, getattr(CudaEngine, name)))
    assert _stepper(engine, best + 1).step(7) == best
    assert runs == ["run", "run_greedy"]  # the prompt's run; no logits after it
    limited = _stepper(engine, best)
    assert limited.step(7) == logits[:best].argmax()
    assert runs[2:] == ["run", "run_greedy", "run"]
    assert limited.context.tokens == plain.tokens
    assert limited.context.state.position == plain.state.position
    monkeypatch.setattr(CudaEngine, "finds_argmax", False)
    assert _stepper(engine, 1 << 30).step(7) == best
    assert runs[5:] == ["run", "run"]


def _recorded(runs: list[str], run: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*args: Any, **options: Any) -> Any:
        runs.append(run.__name__)
        return run(*args, **options)

    return recorded
