"""Answers under `asyncio`, and closed sessions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from logging.handlers import BufferingHandler

import pytest

from edge.errors import InputError
from edge.runtime.session import Session
from tests.session_models import model

PROMPT = "hello there"


@pytest.fixture
def session() -> Session:
    return model("base").session(seed=1)


def test_async_iteration_gives_the_same_answer(session: Session) -> None:
    expected = model("base").session(seed=1).generate(PROMPT, max_tokens=12).finish()

    async def pieces() -> list[str]:
        return [piece async for piece in session.generate(PROMPT, max_tokens=12)]

    assert "".join(asyncio.run(pieces())) == expected.text


def test_awaiting_gives_the_result(session: Session) -> None:
    async def result() -> tuple[int, ...]:
        return (await session.generate(PROMPT, max_tokens=5)).tokens

    assert len(asyncio.run(result())) == 5


def test_the_loop_is_free_while_the_model_runs(session: Session) -> None:
    threads = set()
    inner = session.model.engine.run

    async def talk() -> None:
        answer = session.generate(PROMPT, max_tokens=3)
        run_in = threading.current_thread()

        def run(*args: object, **named: object) -> object:
            threads.add(threading.current_thread() is run_in)
            return inner(*args, **named)

        session.model.engine.run = run
        try:
            await answer
        finally:
            session.model.engine.run = inner

    asyncio.run(talk())
    assert threads == {False}


def test_a_cancelled_task_leaves_a_session_that_can_be_used(session: Session) -> None:
    async def interrupted() -> None:
        answer = session.generate(PROMPT, max_tokens=1_000_000)
        begun = asyncio.Event()

        async def talk() -> None:
            async for _ in answer:
                begun.set()

        task = asyncio.create_task(talk())
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # again, during the same step
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert answer.result.finish_reason == "cancelled"

    asyncio.run(interrupted())
    assert not session.busy
    assert session.generate(None, max_tokens=3).finish().tokens


def test_leaving_a_loop_ends_the_answer(session: Session) -> None:
    async def left() -> None:
        async for _ in session.generate(PROMPT, max_tokens=1_000_000):
            break
        assert not session.busy

    asyncio.run(left())


def test_a_failure_reaches_the_task(session: Session) -> None:
    session.generate(PROMPT, max_tokens=3).finish()
    answer = session.generate(PROMPT)
    session.close()

    async def talk() -> None:
        await answer

    with pytest.raises(InputError, match="closed"):
        asyncio.run(talk())


def test_prefill_counts_the_tokens_fed(session: Session) -> None:
    answer = session.generate(PROMPT * 20, max_tokens=2)
    assert answer.prefill == (0, 0)
    answer.finish()
    read, length = answer.prefill
    assert read == length == answer.result.prompt_tokens > 0


def test_a_closed_session_refuses_everything_but_its_transcript() -> None:
    with model("base").session() as session:
        session.generate(PROMPT, max_tokens=3).finish()
        unfinished = session.generate(PROMPT, max_tokens=1_000_000)
        next(unfinished)
    assert session.messages == () and not session.busy
    for use in (
        lambda: session.tokens,
        lambda: session.generate(PROMPT),
        lambda: session.snapshot(),
        lambda: session.regenerate(),
        lambda: session.reset(),
    ):
        with pytest.raises(InputError, match="the session is closed"):
            use()
    assert unfinished.finish().finish_reason == "cancelled"
    session.close()  # closing twice has no further effect


def test_loggers_say_how_answers_ended(session: Session) -> None:
    kept, logger = BufferingHandler(10), logging.getLogger("edge")
    logger.addHandler(kept)
    logger.setLevel("INFO")
    try:
        made = session.generate(PROMPT, max_tokens=3).finish()
    finally:
        logger.removeHandler(kept)
        logger.setLevel("NOTSET")
    (record,) = kept.buffer
    assert record.name == "edge.answer" and record.filename == "session.py"
    assert record.getMessage().startswith(
        f"length: {made.prompt_tokens} tokens fed, 0 reused, 3 made in "
    )
