"""Answers token by token: each when it is sampled, with drafts, grammars, stops, and `asyncio`."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import edge
from edge.runtime.token_stream import Token
from tests.session_models import END, model

PROMPT = "one two three one two three one two"


@pytest.mark.parametrize("draft", [None, "ngram", "model"])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 2.0, "regex": "(ab|abc|[0-9]){9}"}],
    ids=["greedy", "constrained"],
)
def test_tokens_are_the_results_own(draft: str | None, sampling: dict[str, Any]) -> None:
    target = model("base")
    drafter = model("base") if draft == "model" else draft
    session = target.session(draft=drafter, draft_tokens=3 if draft else None, seed=4)
    answer = session.generate(PROMPT, max_tokens=24, logprobs=2, **sampling)
    tokens: list[Token] = []
    positions = set()
    for token in answer.by_token():
        tokens.append(token)
        positions.add(session.position)
        assert len(answer.text) <= sum(len(each.text) for each in tokens)
    result = answer.result
    assert tuple(token.id for token in tokens) == result.tokens
    assert tuple(token.logprob for token in tokens) == result.logprobs
    whole = target.tokenizer.decode(result.tokens, continued=True)
    shown = "".join(token.text for token in tokens)
    assert whole in (shown, shown + "\ufffd")
    accepted = result.speculation.accepted if result.speculation else 0
    assert (len(positions) < len(tokens)) == bool(accepted), "accepted drafts need no run"
    assert accepted or draft is None


def test_each_token_comes_before_the_next_run() -> None:
    """A stop string that never ends holds the text back, but no token."""
    session = model("bytes").session()
    sampling = {"max_tokens": 12, "seed": 2, "regex": "[a-z ]+"}
    whole = session.chat("Hello", **sampling).finish().text
    answer = session.regenerate(stop=whole + "…", **sampling)
    shown = []
    for number, token in enumerate(answer.by_token()):
        if number == 0:
            start = session.position
        assert session.position == start + number and not answer.text
        assert token.logprob is None
        shown.append(token.text)
    assert answer.result.finish_reason == "length" and "".join(shown) == answer.text


def test_a_character_comes_with_its_last_byte() -> None:
    session = model("bytes").session()
    answer = session.chat("Hello", regex="(é😀){2}", max_tokens=40)
    texts = [token.text for token in answer.by_token()]
    assert texts[:12] == [*["", "é", "", "", "", "😀"] * 2]
    assert answer.result.text == "é😀é😀"


def test_tokens_of_a_stop_string_are_given() -> None:
    session = edge.load("demo", threads=1).session()
    whole = session.chat("Hello!", temperature=0).finish().text
    answer = session.regenerate(temperature=0, stop=whole[5:8])
    tokens = list(answer.by_token())
    assert answer.text == whole[:5]
    assert "".join(token.text for token in tokens).startswith(whole[:8])
    assert tuple(token.id for token in tokens) == answer.result.tokens


def test_an_end_token_has_no_text() -> None:
    session = model("chat").session()
    answer = session.chat("Hello", max_tokens=4, logit_bias={END: 100.0})
    assert [*answer.by_token()] == [Token(END, "", None)]
    assert answer.result.finish_reason == "stop"


def test_it_begins_with_the_first_token() -> None:
    session = model("base").session(seed=1)
    answer = session.generate(PROMPT, max_tokens=9)
    some = next(piece for piece in answer if piece)
    tokens = answer.by_token()
    assert next(tokens).id == answer.by_token().__next__().id
    rest = [*tokens]
    assert answer.ended and answer.text.startswith(some) and len(rest) == 8
    assert [token.id for token in answer.by_token()] == [*answer.result.tokens]


def test_dropping_it_ends_the_answer() -> None:
    session = model("base").session(seed=1)
    for _ in session.generate(PROMPT, max_tokens=100).by_token():
        break
    gc.collect()
    assert not session.busy
    assert session.generate(" more", max_tokens=2).finish().finish_reason == "length"


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_under_asyncio(draft: str | None) -> None:
    target = model("base")
    expected = [*target.session(seed=1, draft=draft).generate(PROMPT, max_tokens=12).by_token()]
    session = target.session(seed=1, draft=draft)

    async def talk() -> list[Token]:
        return [token async for token in session.generate(PROMPT, max_tokens=12).by_token()]

    assert asyncio.run(talk()) == expected and len(expected) == 12


def test_a_cancelled_task_ends_the_answer() -> None:
    session = model("base").session(seed=1)

    async def talk(begun: asyncio.Event) -> None:
        async for _ in session.generate(PROMPT, max_tokens=1_000_000).by_token():
            begun.set()

    async def interrupted() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(talk(begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert not session.busy
