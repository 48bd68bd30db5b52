"""What a talk says drafting gains: sums by hand, and the lines that people see."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.apps.chat_gain import Gain
from edge.apps.profiling.stopwatch import Spent, timed
from edge.runtime.generate import GenerationResult, Timings
from edge.runtime.speculate.decode import Speculation
from tests.session_models import bundle, model
from tests.terminal import Terminal


def _result(stamps: tuple[float, ...], drafted: Speculation) -> GenerationResult:
    timings = Timings(0.0, stamps, stamps[-1])
    return GenerationResult("", (0,) * len(stamps), "stop", 4, 0, timings, drafted)


def test_estimate_by_hand() -> None:
    _, engine = timed(model("base"))
    gain = Gain(engine)
    # a prompt, two plain steps, a verifying run: too few steps yet
    engine.runs += [Spent(9.0, 5, True), Spent(0.03, 1, False), Spent(0.05, 1, False),
                    Spent(0.07, 4, False)]  # fmt: skip
    first = Speculation("small", rounds=1, drafted=3, accepted=3, steps=2)
    assert gain.add(_result((1.0, 1.1, 1.2), first)) is None
    assert "acceptance length 4.00 over 1 verifying runs" in gain.line()
    assert "too few plain steps" in gain.line()
    # one more step of 40 ms: the median of 30, 40 and 50; 4 tokens took 80 ms
    engine.runs.append(Spent(0.04, 1, False))
    second = Speculation("small", rounds=2, drafted=6, accepted=1, steps=1)
    assert gain.add(_result((2.0, 2.02, 2.04, 2.06, 2.08), second)) == pytest.approx(2.0)
    assert not engine.runs
    # all in all 6 tokens in 280 ms, 4 accepted in 3 runs
    assert "acceptance length 2.33 over 3" in gain.line()
    assert f"about {6 * 0.04 / 0.28:.2f} times" in gain.line()
    assert "3 plain steps of this talk, 40.00 ms each" in gain.line()


def test_nothing_drafted_is_said() -> None:
    _, engine = timed(model("base"))
    gain = Gain(engine)
    assert gain.add(_result((1.0,), Speculation("small"))) is None
    assert gain.line() == "no draft has been verified"


def test_stats_of_a_talk_that_drafts(tmp_path: Path) -> None:
    terminal = Terminal(
        str(bundle("chat")), "--temperature", "0", "--max-tokens", "24", "--draft",
        str(bundle("chat")), "--draft-auto", XDG_DATA_HOME=str(tmp_path),
    )  # fmt: skip
    terminal.ask("one two three")
    terminal.wait_for("a run,")
    terminal.ask("/stats")
    terminal.wait_for("acceptance length")
    terminal.ask("/bye")
    assert terminal.leave() == 0
