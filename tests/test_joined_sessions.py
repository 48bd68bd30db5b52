"""Conversations in several threads of one model, whose tokens run together: each gets the answer
that it gets alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import edge
from edge.errors import EngineError, InputError
from edge.runtime.joined import JoinedEngine
from edge.runtime.model import Model
from edge.runtime.result import GenerationResult

TOKENS = 24
# the prompt of each conversation, and its options
TALKS: list[tuple[str, dict[str, Any]]] = [
    ("Hello", {"temperature": 0}),
    ("What is a robot? " * 12, {"temperature": 0.9, "seed": 3, "top_k": 20}),
    ("Go", {"temperature": 1.2, "seed": 4, "repetition_penalty": 1.3, "logprobs": 2}),
    ("Left or right?", {"temperature": 0.8, "seed": 5, "choices": ["left", "right", "nowhere"]}),
    ("Hello", {"temperature": 0, "stop": ["e "]}),
    ("Count", {"temperature": 0.7, "seed": 6, "min_p": 0.05, "presence_penalty": 0.5}),
]


@pytest.fixture(scope="module")
def model() -> Model:
    return edge.load("demo", threads=1).joined()


def answer(model: Model, talk: tuple[str, dict[str, Any]]) -> GenerationResult:
    text, how = talk
    with model.session() as session:
        return session.generate(text, max_tokens=TOKENS, **how).finish()


def together(*work: Callable[[], Any]) -> list[Any]:
    """Run each in its own thread; return their results."""
    found: list[Any] = [None] * len(work)

    def one(index: int) -> None:
        try:
            found[index] = work[index]()
        except Exception as problem:
            found[index] = problem

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_each_says_what_it_says_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, seeded, penalised, with log probabilities, a grammar and a stop string; they end at
    different times, and prompts are read in between.
    """
    alone = [answer(model, talk) for talk in TALKS]
    sizes = _sizes(model, monkeypatch)
    for _ in range(20):  # until three ran together
        found = together(*(lambda talk=talk: answer(model, talk) for talk in TALKS))
        for one, other in zip(alone, found, strict=True):
            assert (one.text, one.tokens, one.finish_reason) == (
                other.text, other.tokens, other.finish_reason)  # fmt: skip
            assert one.logprobs == other.logprobs
        if model.engine.name != "cpu" or max(sizes) > 2:
            return
    raise AssertionError("they never came together")


def test_one_that_is_cancelled_late_or_failing_leaves_the_others_whole(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(model, TALKS[0])

    def cancelled() -> GenerationResult:
        with model.session() as session:
            talk = session.generate("Hello", max_tokens=10_000, temperature=0, stop=[])
            next(talk)
            talk.cancel()
            return talk.finish()

    def late() -> GenerationResult:
        with model.session() as session:
            return session.generate("Hello", max_tokens=10_000, deadline_s=0.05).finish()

    def failing() -> None:
        state = model.engine.new_state()
        model.engine.run(np.asarray([[1]]), state)
        model.engine.run(np.asarray([[1 << 30]]), state)

    found = together(lambda: answer(model, TALKS[0]), cancelled, late, failing)
    assert found[0].tokens == expected.tokens
    assert found[1].finish_reason in ("cancelled", "stop")
    assert found[2].finish_reason in ("deadline", "stop")
    assert isinstance(found[3], InputError)

    joint = model.engine.engine
    if not hasattr(joint, "step_jointly"):
        return

    def broken(steps: Any) -> Any:
        raise EngineError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(joint, "step_jointly", broken)
        gate = threading.Barrier(2)

        def step() -> Any:
            state = model.engine.new_state()
            gate.wait(60)
            for token in range(50):
                model.engine.run(np.asarray([[token]]), state)

        for problem in together(step, step):
            assert problem is None or "no memory" in str(problem)
    assert answer(model, TALKS[0]).tokens == expected.tokens


class _Interrupt(BaseException):
    """Like KeyboardInterrupt, in any thread."""


@pytest.mark.parametrize("when", ["before", "behind", "waiting"])
def test_an_interrupt_of_one_is_not_the_others(
    model: Model, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Of the thread that runs the joint step, before or after it, or of a waiting thread."""
    engine, joint = model.engine, model.engine.engine
    assert isinstance(engine, JoinedEngine)
    if joint.most_joined < 2:
        pytest.skip("no joint steps on this engine")
    expected = answer(model, TALKS[0]).tokens
    real, wait = joint.step_jointly, engine._changed.wait
    members: list[int] = []  # states of the current step
    interrupted: list[int] = []
    seen = threading.Event()

    def stepped(steps: Any) -> Any:
        if interrupted or len(steps) < 2:
            return real(steps)
        if when == "waiting":
            members.append(threading.get_ident())
            assert seen.wait(60)
            return real(steps)
        interrupted.append(threading.get_ident())
        if when == "behind":
            real(steps)
        raise _Interrupt

    def waits(timeout: float | None = None) -> Any:
        if members and not interrupted and members[0] != threading.get_ident():
            interrupted.append(threading.get_ident())
            seen.set()
            raise _Interrupt
        return wait(0.01)

    monkeypatch.setattr(joint, "step_jointly", stepped)
    monkeypatch.setattr(engine._changed, "wait", waits)

    def talk() -> list[list[int]]:
        """Return the answers, including a second one of the interrupted conversation."""
        with model.session() as session:
            said = []
            with suppress(_Interrupt):
                said.append(session.generate("Hello", max_tokens=TOKENS, temperature=0).finish())
            if not said:
                position = session.position
                time.sleep(0.2)
                assert session.position == position, "another thread went on with the state"
                session.reset()
                said += [session.generate("Hello", max_tokens=TOKENS, temperature=0).finish()] * 2
            return [one.tokens for one in said]

    count = 2 if when == "waiting" else 3  # so that the waiting thread waits for the step
    for _ in range(20):  # until two ran together
        found = together(*[talk] * count)
        if interrupted:
            break
    assert len(interrupted) == 1
    assert sorted(len(one) for one in found) == [*[1] * (count - 1), 2], found
    assert all(one[0] == expected for one in found)


def test_who_reads_a_long_prompt_lets_others_step_in_between(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, order = model.engine, []
    assert isinstance(engine, JoinedEngine)
    real, meanwhile = engine.engine.run, threading.Semaphore(0)

    def run(tokens: Any, *arguments: Any, **options: Any) -> Any:
        order.append(tokens.shape[1])
        if tokens.shape[1] > 1:
            meanwhile.release()
            until = time.monotonic() + 60
            while engine.requests < 2 and time.monotonic() < until:
                time.sleep(0.001)  # the other one arrives meanwhile
        return real(tokens, *arguments, **options)

    monkeypatch.setattr(engine.engine, "run", run)
    ids = np.ones((1, engine.chunk), np.int64)
    states = [engine.new_state(capacity=8 * engine.chunk) for _ in range(2)]

    def read() -> None:
        for _ in range(6):
            engine.run(ids, states[0], commit=True)

    def step() -> None:
        for _ in range(6):
            assert meanwhile.acquire(timeout=60)
            engine.run(ids[:, :1], states[1])
        engine.leave(states[1])

    assert together(read, step) == [None, None]
    assert order == [engine.chunk, 1] * 6
    assert states[0].position == 6 * engine.chunk and states[1].position == 6


def _sizes(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the number of states of each joint run from now on."""
    sizes, joint = [1], model.engine.engine
    if hasattr(joint, "step_jointly"):
        real = joint.step_jointly

        def counted(steps: Any) -> Any:
            sizes.append(len(steps))
            return real(steps)

        monkeypatch.setattr(joint, "step_jointly", counted)
    return sizes
