"""Log probabilities of generated tokens, against the engine asked again; and answers in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

import edge
from edge.apps.serve.slot import Slot
from edge.runtime.model import Model
from edge.runtime.parameters import SamplingParams
from tests.server_process import END, HELLO, Server
from tests.session_models import bundle, model

PROMPT = "one two three one two three one two"


def expected(model: Model, prompt: list[int], tokens: tuple[int, ...]) -> Any:
    """Return [N, V]: log softmax before each token, from one run over all of them in fp64."""
    state, size = model.engine.new_state(), model.tokenizer.vocab_size
    feed = np.array([[*prompt, *tokens[:-1]]], np.int64)
    rows = [
        model.engine.run(feed[:, i : i + 1], state)[0, -1, :size].copy() for i in range(feed.size)
    ]
    logits = np.array(rows[len(prompt) - 1 :], np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 3.0, "top_k": 9, "presence_penalty": 1.5, "logit_bias": {5: 3.0}},
        {"temperature": 2.0, "regex": "(ab|abc|[0-9]){9}"},
    ],
    ids=["greedy", "sampled", "held"],
)
def test_they_are_the_models_own(draft: str, sampling: dict[str, Any]) -> None:
    """However the token was chosen: bias, penalties, temperature, a grammar, a verified draft."""
    target = model("base")
    drafter = {"none": None, "ngram": "ngram", "model": model("base")}[draft]
    session = target.session(draft=drafter, draft_tokens=3 if drafter else None, seed=4)
    result = session.generate(PROMPT, max_tokens=24, logprobs=12, **sampling).finish()
    assert [one.token for one in result.logprobs] == list(result.tokens)
    prompt = list(session.tokens[: -len(result.tokens) + (session.pending is not None)])
    rows = expected(target, prompt, result.tokens)
    for one, row in zip(result.logprobs, rows, strict=True):
        assert one.logprob == pytest.approx(row[one.token], abs=2e-4)
        assert [v for _, v in one.top] == pytest.approx(np.sort(row)[::-1][:12], abs=2e-4)
        assert all(value == pytest.approx(row[token], abs=2e-4) for token, value in one.top)
        text = target.tokenizer.decode(result.tokens[: result.logprobs.index(one)], continued=True)
        assert "\ufffd" in text or one.at == len(text)
    if draft == "model":
        assert result.speculation is not None and result.speculation.rounds


def test_none_are_kept_unasked_and_the_end_is_no_text() -> None:
    session = edge.load("demo", threads=1).session()
    assert session.chat("Hello!", temperature=0).finish().logprobs == ()
    answer = session.regenerate(temperature=0, logprobs=0)
    told: list[int] = []
    for _ in answer:
        told += [one.token for one in answer.logprobs(len(told))]
    result = answer.result
    assert result.tokens == (*told, int(END)) and len(result.logprobs) == len(told) + 1
    assert all(one.top == () for one in result.logprobs)
    # text removed by a stop string is not reported
    stop = result.text[3:6]
    cut = session.regenerate(temperature=0, logprobs=0, stop=stop)
    text = cut.finish().text
    assert text == result.text[: result.text.index(stop)]
    assert all(one.at < len(text) for one in cut.logprobs()) and len(cut.logprobs()) < len(told)


def test_more_answers_begin_from_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = model("hybrid")
    slot, runs = Slot(tiny, capacity=None, cache_bytes=0), []
    real = tiny.engine.run

    def run(tokens: Any, *arguments: Any, **options: Any) -> Any:
        runs.append(tokens.shape[1])
        return real(tokens, *arguments, **options)

    monkeypatch.setattr(tiny.engine, "run", run)
    prompt = list(range(10, 30))
    hot = SamplingParams(temperature=3.0, seed=11, max_tokens=6, logit_bias={6: -100.0})
    first = slot.begin(prompt, hot, continued=True, more=True).finish()
    others = [slot.again(hot, continued=True).finish() for _ in range(2)]
    assert [count for count in runs if count > 1] == [16, 4]
    assert len({result.tokens for result in (first, *others)}) == 3
    assert [result.reused_tokens for result in others] == [20, 20]
    # each equals the answer of a session that read the prompt itself, with the same random numbers
    session = tiny.session()
    again = session.generate(prompt, **_keywords(hot)).finish()
    assert again.tokens == first.tokens
    free = _keywords(hot) | {"seed": None}
    assert [session.regenerate(**free).finish().tokens for _ in range(2)] == [
        result.tokens for result in others
    ]


def _keywords(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "seed", "max_tokens", "logit_bias")
    return {name: getattr(params, name) for name in names}


# -- over HTTP -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with Server(bundle=str(bundle("bytes"))) as running:
        yield running.client()


ASKED: dict[str, Any] = {"model": "bytes", "messages": HELLO, "temperature": 1.5, "seed": 3,
                         "max_tokens": 9}  # fmt: skip


def test_the_api_tells_them_whole_and_streamed(client: openai.OpenAI) -> None:
    given: dict[str, Any] = ASKED | {"logprobs": True, "top_logprobs": 3, "n": 3}
    whole = client.chat.completions.create(**given)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert whole.usage is not None and whole.usage.completion_tokens == 27
    content: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    texts = dict.fromkeys(content, "")
    reasons = dict(content)
    for chunk in client.chat.completions.create(**given, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        content[choice.index] += (choice.logprobs and choice.logprobs.content) or []
        reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert texts[choice.index] == choice.message.content
        assert content[choice.index] == choice.logprobs.content
        assert reasons[choice.index] == choice.finish_reason == "length"
        said = bytes(byte for one in choice.logprobs.content for byte in one.bytes or [])
        assert said.decode(errors="replace") == choice.message.content
        for one in choice.logprobs.content:
            assert len(one.top_logprobs) == 3 and one.logprob < 0
            assert one.top_logprobs[0].logprob >= one.logprob
    alone = client.chat.completions.create(**ASKED)
    assert alone.choices[0].message.content == whole.choices[0].message.content
    assert alone.choices[0].logprobs is None


def test_completions_tell_them_in_their_own_shape(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "bytes", "prompt": "x", "max_tokens": 12, "seed": 1}
    [choice] = client.completions.create(**given, logprobs=2, temperature=2).choices
    told = choice.logprobs
    assert told is not None and told.tokens and told.token_logprobs and told.top_logprobs
    assert len(told.tokens) == len(told.text_offset or []) == len(told.top_logprobs) == 12
    for token, at in zip(told.tokens, told.text_offset or [], strict=True):
        text = choice.text[at:].lstrip("\ufffd")  # of an unfinished character
        assert token.startswith("bytes:\\x") or text.startswith(token)
    assert any(token.startswith("bytes:\\x") for token in told.tokens)
    assert all(math.isfinite(value or 0) for value in told.token_logprobs)
    [choice] = client.completions.create(**given, logprobs=0).choices
    assert choice.logprobs is not None and choice.logprobs.top_logprobs == [{}] * 12


def test_penalties_reach_the_sampler(client: openai.OpenAI) -> None:
    def said(**penalties: Any) -> list[str]:
        answer = client.completions.create(
            model="bytes", prompt="x", temperature=0, max_tokens=40, logprobs=0,
            logit_bias={"97": 100, "98": 98}, **penalties,
        )  # fmt: skip
        assert answer.choices[0].logprobs is not None
        return answer.choices[0].logprobs.tokens or []

    assert set(said()) == {"a"}
    assert set(said(frequency_penalty=1.0)) >= {"a", "b"}
    assert set(said(presence_penalty=2.0, extra_body={"repetition_window": 0})) == {"a"}
