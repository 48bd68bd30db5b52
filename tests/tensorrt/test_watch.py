"""A build's progress as one number, and how a build is interrupted."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from edge.runtime.tensorrt.watch import Interruptible, Progress


def shown(
    events: list[tuple[str, ...] | tuple[str, str | None, int] | tuple[str, int]],
) -> list[float]:
    """Return the reports for starts (name, parent, steps), steps (name, step) and ends (name,)."""
    told: list[float] = []
    progress = Progress(lambda _, done, of: told.append(round(done / of, 4)))
    for event in events:
        if len(event) == 3:
            progress.start(*event)  # type: ignore[arg-type]
        elif len(event) == 2:
            progress.step(*event)  # type: ignore[arg-type]
        else:
            progress.finish(*event)  # type: ignore[arg-type]
    return told


def test_a_phase_shares_its_parent_s_step() -> None:
    assert shown([("all", None, 2), ("a", "all", 4), ("a", 0), ("a", 3), ("a",), ("all", 0)]) == [
        0, 0, 0.125, 0.5, 0.5,
    ]  # fmt: skip


def test_phases_three_deep() -> None:
    told = shown([("all", None, 2), ("all", 0), ("a", "all", 2), ("b", "a", 5), ("b", 4)])
    assert told == [0, 0.5, 0.5, 0.5, 0.75]


def test_it_never_goes_back_nor_beyond_the_end() -> None:
    told = shown(
        [("a", None, 2), ("a", 1), ("b", None, 10), ("b", 3), ("a", 5), ("c", "gone", 0), ("c", 9)]
    )
    assert told == sorted(told) and told[-1] == 1.0


def test_steps_of_a_phase_that_was_not_announced_are_borne() -> None:
    assert shown([("x", 3)]) == [1.0]


def test_a_result_comes_back_and_an_error_too() -> None:
    assert Interruptible(lambda: 5, threading.Event()).result() == 5
    with pytest.raises(KeyError, match="lost"):
        Interruptible(lambda: {}["lost"], threading.Event()).result()


def test_an_interrupt_stops_the_work_and_is_raised_when_it_has_ended() -> None:
    stop, order = threading.Event(), []

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(60)
        order.append("stopped")

    with pytest.raises(KeyboardInterrupt):
        Interruptible(work, stop).result()
    assert order == ["stopped"]
