"""The likeliest token found on the device: what the logits say, without the logits."""

from __future__ import annotations

import numpy as np
import pytest

from edge.errors import EngineError
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.generate import Context
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


def _context(engine: CudaEngine) -> Context:
    context = Context(engine, engine.new_state(window=4))
    context.advance([3, 5])
    return context


def test_padding_ids_are_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("mamba1", "fp32").cuda
    plain, limited, old = _context(engine), _context(engine), _context(engine)
    logits = plain.step(7).copy()
    best = int(logits.argmax())
    assert _context(engine).step_greedily(7, best + 1) == best
    found = limited.step_greedily(7, best)
    np.testing.assert_array_equal(found, logits)
    assert limited.tokens == plain.tokens
    assert limited.state.position == plain.state.position
    monkeypatch.setattr(CudaEngine, "finds_argmax", False)
    np.testing.assert_array_equal(old.step_greedily(7, 1 << 30), logits)
