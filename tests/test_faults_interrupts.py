"""An interrupt before any bytecode of the runtime: the operation under way has happened or has not,
and the session continues.

EDGE_FAULT_INTERRUPTS=100000 interrupts at every one instead of a sample.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import edge.runtime
from edge.apps.serve import responses, slot
from edge.apps.serve.errors import ApiError, encode
from edge.errors import EngineError
from edge.runtime.cuda.faults import DriverFaults
from edge.runtime.cuda.install import Modules
from edge.runtime.cuda.turns import DriverTurns
from edge.runtime.model import Model
from edge.runtime.request import Hold
from edge.runtime.session import Session
from tests.session_models import bundle, states

POINTS = int(os.environ.get("EDGE_FAULT_INTERRUPTS", "40"))
ROOM = str(Path(edge.runtime.__path__[0]))
Verb = Callable[[Session], object]


class Interrupt:
    """A trace function that raises before bytecode number `at` of the runtime, or of `room`."""

    def __init__(
        self, at: int, room: str = ROOM, problem: type[BaseException] = KeyboardInterrupt
    ) -> None:
        self.at, self.seen, self._room, self._problem = at, 0, room, problem

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Interrupt | None:
        if not frame.f_code.co_filename.startswith(self._room):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                raise self._problem
        return self


def interrupted(verb: Verb, session: Session, at: int, *, held: bool = False) -> int:
    """Return the bytecodes that ran; `held`: the exception and its frames stay referenced."""
    tracer = Interrupt(at)
    before, hook = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = lambda _: None  # pytest's hook keeps exceptions of a dropped answer
    sys.settrace(tracer)
    try:
        verb(session)
    except KeyboardInterrupt as problem:
        if held:
            session.kept = problem  # type: ignore[attr-defined]
    finally:
        sys.settrace(before)
        sys.unraisablehook = hook
    return tracer.seen


def say(session: Session) -> None:
    for _ in session.chat("and why", max_tokens=3, temperature=0):
        pass


def drop(session: Session) -> None:
    """Stop iterating; the answer ends when its last reference is gone."""
    answer = session.chat("and why", max_tokens=3, temperature=0)
    next(answer)


def again(session: Session) -> None:
    session.regenerate(max_tokens=3, temperature=0).finish()


@cache
def snapshot(engine: str) -> Any:
    return fresh(engine).snapshot()


@cache
def loaded(engine: str) -> Model:
    return edge.load(bundle("chat"), engine=engine, threads=1)


def fresh(engine: str, **options: Any) -> Session:
    session = loaded(engine).session(window=4, seed=1, **options)
    session.chat("a robot", max_tokens=3, temperature=0).finish()
    return session


def all_of(session: Session) -> tuple[Any, ...]:
    """Return the whole session: transcript, tokens and the state's bytes."""
    held = session.messages, session.tokens, session.pending, session.undo_levels
    arrays = states(session)
    return (*held, *(array.tobytes() for _, array in sorted(arrays.items())))


def outcomes(verb: Verb, engine: str, **options: Any) -> list[tuple[Any, ...]]:
    """Return the valid outcomes: nothing, everything, or an answer that ended after some token."""
    found = [all_of(fresh(engine, **options))]
    for most in (1, 2, 3):
        session = fresh(engine, **options)
        if verb is again:
            session.regenerate(max_tokens=most, temperature=0).finish()
        elif verb in (say, drop):
            session.chat("and why", max_tokens=most, temperature=0).finish()
        else:
            verb(session)
        found.append(all_of(session))
    return found


@pytest.mark.parametrize("engine", ["ort", "cpu"])
@pytest.mark.parametrize("name", ["say", "drop", "again", "undo", "reset", "restore", "load"])
def test_interrupted_at_any_bytecode(name: str, engine: str, tmp_path: Path) -> None:
    fresh(engine).save(tmp_path / "talk")
    verbs: dict[str, Verb] = {
        "say": say, "drop": drop, "again": again,
        "undo": Session.undo, "reset": Session.reset,
        "restore": lambda session: session.restore(snapshot(engine), undoable=True),
        "load": lambda session: session.load(tmp_path / "talk"),
    }  # fmt: skip
    verb = verbs[name]
    options = {"draft": "ngram", "draft_tokens": 2} if name == "say" else {}
    allowed = outcomes(verb, engine, **options)
    every = interrupted(verb, fresh(engine, **options), 0)
    points = sorted(random.Random(name).sample(range(1, every + 1), min(POINTS, every)))
    seen = set()
    for at in points:
        session = fresh(engine, **options)
        held = at % 2 == 0
        interrupted(verb, session, at, held=held)
        if held:  # so is the answer, which waits to be iterated
            session.cancel()
            session.snapshot()
        assert not session.busy, at
        now = all_of(session)
        assert now in allowed, f"bytecode {at} of {every}"
        seen.add(allowed.index(now))
        session.chat("so", max_tokens=1, temperature=0).finish()
        assert session.messages[-2].content == "so"
    assert 0 in seen, "no interrupt came before the end"


def test_a_hold_left_behind_is_taken_over_and_another_is_not() -> None:
    hold = Hold("in use", "wait")

    def leave() -> None:
        hold.take(sys._getframe())

    leave()
    with hold, pytest.raises(EngineError, match="in use"), hold:
        pass
    waits, order = Hold("in use", "wait", waits=True), []

    def hold_it(name: str) -> None:
        with waits, waits:
            order.append(name)

    waits.take(sys._getframe())
    thread = threading.Thread(target=hold_it, args=("second",))
    thread.start()
    order.append("first")
    waits.release()
    thread.join(60)
    assert order == ["first", "second"]


def _turns() -> DriverTurns:
    """Return turns on a driver that always succeeds."""
    api: Any = SimpleNamespace(
        cuCtxGetCurrent=lambda: (0, 0), cuCtxSetCurrent=lambda _: (0,),
        cuStreamQuery=lambda _: (0,), cuCtxPushCurrent=lambda _: (0,), cuCtxPopCurrent=lambda: (0,),
    )  # fmt: skip
    place: Any = SimpleNamespace(context=1, handle=1, owner=object())
    return DriverTurns(Modules(api=api, core=api), DriverFaults(api), place)


def test_a_turn_that_an_interrupt_ended_is_free_again() -> None:
    def use(turns: DriverTurns) -> None:
        with turns:
            pass

    def release(handle: object) -> tuple[int]:
        freed.append(handle)
        return (0,)

    freed: list[object] = []
    for at in range(1, 10_000):
        turns, tracer = _turns(), Interrupt(at)
        before = sys.gettrace()
        sys.settrace(tracer)
        with suppress(KeyboardInterrupt):
            use(turns)
        sys.settrace(before)
        use(turns)
        turns.free(release, at)
        assert freed == [at], "the memory waits for a turn that nobody has"
        freed.clear()
        if tracer.seen < at:
            return
    raise AssertionError("no end was seen")


def _mark(tokens: list[int], nbytes: int) -> Any:
    return SimpleNamespace(
        consumed=SimpleNamespace(tokens=tokens), state=SimpleNamespace(nbytes=nbytes)
    )


@pytest.mark.parametrize("problem", [KeyboardInterrupt, MemoryError])
def test_kept_states_are_found_or_forgotten_whatever_stopped_their_keeping(
    problem: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server survives a short lack of memory, and so do its kept states."""
    rng = random.Random(3)
    talks = [[rng.randrange(3) for _ in range(rng.randint(1, 6))] for _ in range(10)]
    room = str(slot.__file__)

    def use(store: slot.PrefixStore) -> None:
        for talk in talks:
            store.longest(slot.as_tokens([*talk, 9]))
            store.add(_mark(talk, 2000))

    for at in range(1, 100_000, 7):
        with monkeypatch.context() as patch:  # acquiring the store's lock raises nothing itself
            patch.setattr(threading, "Lock", nullcontext)
            store = slot.PrefixStore(8000)
        tracer = Interrupt(at, room, problem)
        before = sys.gettrace()
        sys.settrace(tracer)
        with suppress(problem):
            use(store)
        sys.settrace(before)
        found = {id(kept): kept.nbytes for talk in talks if (kept := _found(store, talk))}
        assert len(found) == len(store), at
        assert sum(found.values()) == store.nbytes <= 8000, at
        use(store)
        assert store.longest(slot.as_tokens([*talks[-1], 9])) is not None
        if tracer.seen < at:
            return
    raise AssertionError("no end was seen")


def _found(store: slot.PrefixStore, talk: list[int]) -> slot.KeptState | None:
    """Return the kept state of exactly these tokens."""
    kept = store.longest(slot.as_tokens([*talk, 9]))
    return kept if kept and kept.tokens.tolist() == talk else None


def _is_kept(kept: responses.KeptResponses, name: str) -> bool:
    try:
        return kept.items(name) == ["y"]
    except ApiError:
        return False


@pytest.mark.parametrize("problem", [KeyboardInterrupt, MemoryError])
def test_kept_responses_are_counted_whatever_stopped_their_keeping(
    problem: type[BaseException],
) -> None:
    room = str(responses.__file__)
    for at in range(1, 10_000):
        kept, tracer = responses.KeptResponses(120), Interrupt(at, room, problem)
        before = sys.gettrace()
        sys.settrace(tracer)
        with suppress(problem):
            for number in range(1, 10):
                kept.keep(f"r{number}", ["x" * 10 * number])
        sys.settrace(before)
        # wrongly counted, there would be room for more or fewer of the next ones
        each = 120 // len(encode(["y"]))
        for number in range(each + 1):
            kept.keep(f"n{number}", ["y"])
        assert not _is_kept(kept, "n0"), at
        assert all(_is_kept(kept, f"n{number}") for number in range(1, each + 1)), at
        if tracer.seen < at:
            return
    raise AssertionError("no end was seen")
