"""What users of one process may do to each other: cancelling, threads, reused states, callbacks
(rows 27 and 30 to 33 of the fault table).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import EdgeError, EngineError, InputError
from edge.runtime.cuda.state import DeviceState
from edge.runtime.session import Session
from tests.session_models import model, same_bits, states

HOT: dict[str, Any] = {"temperature": 5.0, "seed": 3}
PATIENCE = 120  # seconds, on a busy machine


def same(one: Session, other: Session) -> None:
    """Check that two sessions hold the same, to the last bit."""
    assert (one.tokens, one.messages) == (other.tokens, other.messages)
    same_bits(one, other)


# -- cancelling (row 27) ---------------------------------------------------------------------------


def fixed(draft: Any) -> dict[str, Any]:
    """Drafts of one length: a bandit's choices, and so the random numbers drawn, depend on the
    clock.
    """
    return {} if draft is None else {"draft": draft, "draft_tokens": 3}


def cancelled(kind: str, prompt: list[int], at: int, draft: Any) -> tuple[Session, Any, int]:
    """Return a session whose answer is cancelled during the engine's run number `at`, and the
    number of runs.
    """
    session = model(kind).session(**fixed(draft))
    session.generate([5, 6, 7], max_tokens=2, **HOT).finish()
    engine, runs = session.model.engine, []
    real = engine.run

    def run(*arguments: Any, **options: Any) -> Any:
        runs.append(0)
        if len(runs) == at:
            session.cancel()
        return real(*arguments, **options)

    engine.run = run  # type: ignore[method-assign]
    try:
        result = session.generate(prompt, max_tokens=6, **HOT).finish()
    finally:
        del engine.run
    return session, result, len(runs)


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("kind", ["bytes", "hybrid"])
def test_row_27_cancelled_at_every_chunk_and_step(kind: str, draft: Any) -> None:
    """Within one run. Before the first token nothing remains; after it the existing tokens stay."""
    prompt = [9, 8, 7] * 11  # three chunks of at most 16
    before = model(kind).session(**fixed(draft))
    before.generate([5, 6, 7], max_tokens=2, **HOT).finish()
    _, whole, every = cancelled(kind, prompt, 0, draft)
    chunks = -(-(len(prompt) + 1) // model(kind).engine.chunk)
    assert chunks == 3 and every > chunks
    for at in range(1, every + 1):
        session, result, runs = cancelled(kind, prompt, at, draft)
        assert runs == at or (at == every and result.finish_reason != "cancelled")
        # after a cancel only the current run completes, with at most its tokens
        assert result.tokens == whole.tokens[: len(result.tokens)]
        if at < chunks:
            assert result.finish_reason == "cancelled" and not result.tokens
            same(session, before)
            assert session.undo_levels == 1
            continue
        assert result.tokens
        held = (*session.tokens, *(() if session.pending is None else (session.pending,)))
        assert held[-len(result.tokens) :] == result.tokens
        if draft is None:  # drafting runs several tokens at a time, which rounds differently
            twin = model(kind).session()
            twin.generate([5, 6, 7], max_tokens=2, **HOT).finish()
            twin.generate(prompt, max_tokens=len(result.tokens), **HOT).finish()
            same(session, twin)


# -- sessions beside each other (row 30) -----------------------------------------------------------


def talks(kind: str, seed: int, pause: Callable[[], None]) -> list[Any]:
    """Run a session whose actions are all drawn from `seed`; `pause` is called between runs."""
    rng = random.Random(seed)
    out: list[Any] = []
    session = model(kind).session(seed=seed)
    for _ in range(rng.randint(4, 7)):
        verb = rng.choice(["say", "say", "say", "undo", "cancel", "reset", "again"])
        try:
            if verb in ("say", "cancel"):
                text = " ".join(
                    rng.choices(["the", "state", "of", "a", "robot"], k=rng.randint(1, 9))
                )
                answer = session.generate(text, temperature=3.0, max_tokens=rng.randint(1, 9))
                for number, _ in enumerate(answer):
                    pause()
                    if verb == "cancel" and number == 2:
                        answer.cancel()
                out.append(answer.result.tokens)
            elif verb == "again":
                out.append(session.regenerate(temperature=3.0, max_tokens=3).finish().tokens)
            else:
                session.undo() if verb == "undo" else session.reset()
        except EdgeError as problem:
            out.append(str(problem))
        pause()
    out.append((session.tokens, {name: a.tobytes() for name, a in states(session).items()}))
    return out


@pytest.mark.parametrize("kind", ["base", "hybrid"])
def test_row_30_sessions_interleaved_at_random_equal_serial_ones(kind: str) -> None:
    """One step at a time, in a random but repeatable order; and freely."""
    serial = [talks(kind, seed, lambda: None) for seed in range(8)]
    assert len({str(out) for out in serial}) == 8
    for order in (None, 1, 2, 3):
        baton = None if order is None else Baton(random.Random(order), range(8))
        together: dict[int, list[Any]] = {}

        def work(seed: int, baton: Baton | None = baton, out: dict[int, Any] = together) -> None:
            if baton is None:
                out[seed] = talks(kind, seed, lambda: None)
                return
            baton.wait(seed)
            out[seed] = talks(kind, seed, lambda: baton.pass_on(seed))
            baton.leave(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert [together[seed] for seed in range(8)] == serial, f"order {order}"


class Baton:
    """Of several threads only one runs, until it passes the turn to a random one."""

    def __init__(self, rng: random.Random, runners: range) -> None:
        self._rng, self._left, self._turn = rng, list(runners), runners[0]
        self._changed = threading.Condition()

    def wait(self, me: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == me, PATIENCE)

    def pass_on(self, me: int) -> None:
        with self._changed:
            self._turn = self._rng.choice(self._left)
            self._changed.notify_all()
        self.wait(me)

    def leave(self, me: int) -> None:
        with self._changed:
            self._left.remove(me)
            self._turn = self._rng.choice(self._left or [me])
            self._changed.notify_all()


# -- reused states (row 31) ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["base", "chat", "hybrid"])
def test_row_31_a_cleared_state_holds_nothing_of_before(kind: str) -> None:
    """Whatever is in unused slots and rows is never read."""
    used, fresh = (model(kind).engine.new_state(capacity=40) for _ in range(2))
    rng, clean = np.random.default_rng(1), np.random.default_rng(2)
    model(kind).engine.run(rng.integers(0, 40, (1, 16)), used, commit=True)
    model(kind).engine.run(rng.integers(0, 40, (1, 3)), used)
    # canaries: worse than anything a run could have left
    if isinstance(used, DeviceState):
        pieces = [piece for piece in (used.recurrent, used.caches) if piece]
        arrays = [piece.data.view(np.float32) for piece in pieces]  # type: ignore[attr-defined]
    else:
        arrays = [*used.rings.values(), *used.caches.values()]  # type: ignore[attr-defined]
    for array in arrays:
        array.fill(np.float32(1e30).astype(array.dtype))
    used.clear()
    assert used.position == used.reach == 0
    assert not any(array.any() for array in used.arrays().values())
    for step in range(6):
        ids = clean.integers(0, 40, (1, 1 + step % 3))
        runs = [model(kind).engine.run(ids, s, commit=step == 0).copy() for s in (used, fresh)]
        assert runs[0].tobytes() == runs[1].tobytes()
    ours = fresh.arrays()
    for name, array in used.arrays().items():
        assert array.tobytes() == ours[name].tobytes()


def test_row_31_a_reset_session_answers_as_a_new_one(tmp_path: Path) -> None:
    secret = "the secret is 4711 "
    session = model("chat").session(system="be brief", undo_levels=1)
    session.chat(secret * 5, max_tokens=5, **HOT).finish()
    session.reset()
    new = model("chat").session(system="be brief")
    same(session, new)
    answers = [s.chat("what?", max_tokens=8, **HOT).finish().tokens for s in (session, new)]
    assert answers[0] == answers[1]
    session.save(tmp_path / "state")
    assert secret.strip().encode() not in (tmp_path / "state").read_bytes()


# -- one session, two users (rows 32 and 33) -------------------------------------------------------


def test_row_32_two_threads_race_for_one_session() -> None:
    """One is served, the other gets an EdgeError at once; nothing in between remains."""
    session, start = model("bytes").session(), threading.Barrier(2)
    outcomes: list[str] = []

    def ask() -> None:
        for _ in range(60):
            start.wait(PATIENCE)
            try:
                session.generate("a", max_tokens=3, temperature=0).finish()
                outcomes.append("answered")
            except (EngineError, InputError) as problem:
                assert "use" in str(problem) or "in progress" in str(problem)
                outcomes.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(outcomes) == 120 and outcomes.count("answered") >= 60
    # each answered turn is there, whole, and only once
    twin = model("bytes").session()
    for _ in range(outcomes.count("answered")):
        twin.generate("a", max_tokens=3, temperature=0).finish()
    same(session, twin)


def test_row_33_a_callback_that_calls_the_session() -> None:
    """From within a run: refused without a deadlock, and the answer continues."""
    session = model("bytes").session()
    expected = model("bytes").session().generate("ab", max_tokens=6, **HOT).finish()
    engine, refused = session.model.engine, []
    real = engine.run
    calls: list[Callable[[], object]] = [
        lambda: session.generate("x").finish(), lambda: session.chat("x"), session.undo,
        session.reset, session.snapshot, lambda: session.save("nowhere"),
        lambda: session.load("nowhere"), session.regenerate, lambda: answer.close(),
        lambda: next(answer),
    ]  # fmt: skip

    def run(*arguments: Any, **options: Any) -> Any:
        for call in calls:
            with pytest.raises((EngineError, InputError)) as caught:
                call()
            refused.append(str(caught.value))
        return real(*arguments, **options)

    answer = session.generate("ab", max_tokens=6, **HOT)
    engine.run = run  # type: ignore[method-assign]
    try:
        result = answer.finish()
    finally:
        del engine.run
    assert result.tokens == expected.tokens
    assert len(refused) >= 6 * len(calls) and all("in use" in text for text in refused)


def test_row_33_between_the_pieces_of_an_answer() -> None:
    session = model("bytes").session()
    for _ in session.generate("ab", max_tokens=4, **HOT):
        with pytest.raises(InputError, match="in progress"):
            session.generate("x")
    assert session.generate("x", max_tokens=1).finish().tokens
