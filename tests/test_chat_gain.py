"""The reported gain from drafting: sums by hand, and the lines that people see."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.apps.chat.gain import Gain
from edge.apps.chat.output import figures
from edge.apps.measure.stopwatch import Spent, timed
from edge.runtime.result import GenerationResult, Timings
from edge.runtime.speculate.decode import Share, Speculation
from edge.runtime.speculate.shape import LOOK_UP, MODEL
from tests.facts import says
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
    first = Speculation("small", rounds=1, drafted=3, accepted=3, steps=2, draft_s=0.02)
    assert gain.add(_result((1.0, 1.05, 1.1, 1.2, 1.2, 1.2, 1.2), first)) is None
    assert "acceptance length 4.00 over 1 verification runs" in gain.line()
    assert "too few plain steps" in gain.line()
    # one more step of 40 ms: the median of 30, 40 and 50. Without drafts the 5 tokens after the
    # first would have taken 5 · 40 ms, plus the 20 ms of 100 that neither model ran
    engine.runs += [Spent(0.04, 1, False), Spent(0.03, 5, False)]
    second = Speculation("small", rounds=2, drafted=6, accepted=1, steps=1, draft_s=0.01)
    stamps = (2.0, 2.06, 2.1, 2.1, 2.1, 2.1)
    assert gain.add(_result(stamps, second)) == pytest.approx(0.22 / 0.1)
    assert not engine.runs
    # in total 11 tokens in 300 ms, 50 of them outside runs; 4 accepted in 3 runs
    assert "acceptance length 2.33 over 3" in gain.line()
    assert f"about {(11 * 0.04 + 0.05) / 0.3:.2f} times" in gain.line()
    assert says(gain.line(), "3 plain steps", "40.00 ms")


def test_without_a_draft_nothing_is_gained_or_lost() -> None:
    _, engine = timed(model("base"))
    gain = Gain(engine)
    engine.runs.append(Spent(5.0, 1, False))  # from an answer that failed
    gain.begin()
    # steps of very different length, as on a busy machine, and 10 ms a token of something else
    spent = [0.01 * (1 + place % 7) for place in range(20)]
    engine.runs += [Spent(seconds, 1, False) for seconds in spent]
    stamps = (1.0, *(1.0 + sum(spent[:count]) + 0.01 * count for count in range(1, 21)))
    assert gain.add(_result(stamps, Speculation("small", steps=20))) == pytest.approx(1)


def test_line_of_figures_names_shapes_where_they_were_chosen() -> None:
    shapes: dict[tuple[int, ...], int] = {(1, 1, 1): 3, (1, 1): 1}
    drafted = Speculation("small", rounds=4, drafted=12, accepted=6, steps=10, accept="top-2",
                          shapes=shapes, sources={MODEL: Share(4, 12, 6, shapes)})  # fmt: skip
    result, session = _result((1.0, 1.1), drafted), model("base").session()
    _, engine = timed(model("base"))
    said = figures(result, session, Gain(engine), 1.24)
    assert "| small 2.5 a run, 30% drafted, about 1.2× plain speed, lossy (top-2), mostly" in said
    assert "mostly drafts of 3 |" in said
    said = figures(result, session, Gain(engine, chosen=False), None)
    assert "| small 2.5 a run, 30% drafted, lossy (top-2) |" in said
    drafted.rounds, drafted.accepted = 9, 21
    drafted.sources[LOOK_UP] = Share(5, 25, 15, {(1,) * 5: 5})
    said = figures(result, session, Gain(engine), None)
    assert "| small 3.3 a run, 5 of 9 runs by look-up, 52% drafted, " in said
    assert "mostly look-ups of 5 |" in said
    drafted.problem = "NaN"
    assert "lossy (top-2), small given up: NaN |" in figures(result, session, None, None)
    nothing = _result((1.0, 1.1), Speculation("small", steps=1, accept="top-2"))
    assert "| small: nothing drafted |" in figures(nothing, session, None, None)


def test_nothing_drafted_is_said() -> None:
    _, engine = timed(model("base"))
    gain = Gain(engine)
    assert gain.add(_result((1.0,), Speculation("small"))) is None
    assert says(gain.line(), "no draft", "verified")


def test_stats_of_a_talk_that_drafts(tmp_path: Path) -> None:
    terminal = Terminal(
        str(bundle("chat")), "--temperature", "0", "--max-tokens", "24", "--draft",
        str(bundle("chat")), "--draft-tokens", "2", size=(24, 160),
        XDG_DATA_HOME=str(tmp_path),
    )  # fmt: skip
    terminal.ask("one two three", "a run,")
    terminal.ask("/stats", "acceptance length")
    terminal.bye()
