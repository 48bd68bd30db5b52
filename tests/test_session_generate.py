"""Running text: prompts, limits, stop reasons, and the session's contents after each."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import edge
from edge.errors import (
    BundleError,
    ContextFullError,
    EngineError,
    InputError,
    StateError,
    TokenizerError,
)
from edge.runtime.session import Session
from tests.session_models import END, bundle, model

HOT = {"temperature": 5.0, "seed": 3}  # random models repeat themselves at low temperature


def greedy(kind: str, prompt: list[int], count: int) -> list[int]:
    """Decode greedily with bare engine runs, one token at a time."""
    engine = model(kind).engine
    state, out = engine.new_state(), []
    for token in prompt:
        logits = engine.run(np.array([[token]]), state)
    for _ in range(count):
        token = int(np.argmax(logits[0, -1][: model(kind).tokenizer.vocab_size]))
        out.append(token)
        logits = engine.run(np.array([[token]]), state)
    return out


@pytest.mark.parametrize("kind", ["base", "bytes", "chat", "hybrid"])
def test_greedy_answers_are_the_engines_best_tokens(kind: str) -> None:
    prompt = model(kind).tokenizer.encode("the state of the model is the whole")  # several chunks
    session = model(kind).session()
    result = session.generate(prompt, temperature=0, max_tokens=12).finish()
    expected = greedy(kind, prompt, 12)
    ends = model(kind).tokenizer.eos
    stop = next((i + 1 for i, token in enumerate(expected) if token in ends), 12)
    assert list(result.tokens) == expected[:stop]
    assert result.text == model(kind).tokenizer.decode(expected[:stop])
    assert session.tokens == (*prompt, *expected[: stop - 1])
    assert session.pending == expected[stop - 1]
    assert result.prompt_tokens == len(prompt) and result.reused_tokens == 0


@pytest.mark.parametrize("kind", ["bytes", "hybrid"])
def test_going_on_is_the_same_as_not_stopping(kind: str) -> None:
    prompt = "the state of"
    whole = model(kind).session().generate(prompt, max_tokens=24, **HOT).finish()
    session = model(kind).session()
    parts = [session.generate(prompt, max_tokens=5, **HOT).finish()]
    while sum(len(part.tokens) for part in parts) < len(whole.tokens):
        left = len(whole.tokens) - sum(len(part.tokens) for part in parts)
        parts.append(session.generate(max_tokens=min(5, left), temperature=5.0).finish())
        assert parts[-1].prompt_tokens == 1  # only the pending token
    assert sum((part.tokens for part in parts), ()) == whole.tokens


def test_pieces_join_to_the_result() -> None:
    session = model("bytes").session()
    generation = session.generate("ab", max_tokens=40, **HOT)
    pieces = list(generation)
    result = generation.result
    assert all(pieces) and "".join(pieces) == result.text == generation.text
    assert result.text == model("bytes").tokenizer.decode(result.tokens)
    assert result.finish_reason == "length" and len(result.tokens) == 40
    times = result.timings
    assert len(times.token_s) == 40 and list(times.token_s) == sorted(times.token_s)
    assert 0 < times.prompt_s <= times.token_s[0] == times.ttft_s
    assert times.token_s[-1] <= times.total_s


def test_end_tokens_stop_and_padding_is_never_sampled() -> None:
    session = model("chat").session()
    result = session.generate("the", temperature=0, logit_bias={END: 1000.0}).finish()
    assert result.tokens == (END,) and result.finish_reason == "stop" and result.text == ""
    assert session.pending == END
    size = model("chat").tokenizer.vocab_size
    assert size < model("chat").config.vocab_size
    session = model("chat").session(seed=1)
    flat = session.generate("the", temperature=100.0, max_tokens=3000, stop=())
    tokens = set(flat.finish().tokens)
    assert max(tokens) < size and len(tokens) > 50


@pytest.mark.parametrize("kind", ["bytes", "chat"])
def test_a_stop_string_never_shows_and_leaves_the_state_before_it(kind: str) -> None:
    free = model(kind).session().generate("the", max_tokens=30, **HOT).finish()
    for start in range(0, len(free.text) - 2, 3):
        stop = free.text[start : start + 2]
        if "\ufffd" in stop:
            continue
        session = model(kind).session()
        generation = session.generate("the", max_tokens=30, stop=[stop], **HOT)
        shown = "".join(generation)
        assert shown == free.text[: free.text.find(stop)]
        assert generation.result.finish_reason == "stop"
        count = generation.result.prompt_tokens
        held = [*session.tokens, *([] if session.pending is None else [session.pending])][count:]
        text = model(kind).tokenizer.decode(held)
        # the session holds what was shown, except for partial tokens and unfinished characters
        assert shown.startswith(text.rstrip("\ufffd")) or text == shown


def test_the_context_of_attention_layers_ends_answers_and_refuses_prompts() -> None:
    session = model("hybrid").session(capacity=20)
    result = session.generate([20] * 10, max_tokens=50, temperature=0, logit_bias={END: -99.0})
    assert result.finish().finish_reason == "context"
    # 10 + 10 tokens are in, the last sampled one is not
    assert len(session.tokens) == 20 and len(result.result.tokens) == 11
    with pytest.raises(ContextFullError, match="20"):
        session.generate("more")
    assert len(session.tokens) == 20
    with pytest.raises(ContextFullError):
        model("hybrid").session(capacity=20).generate([20] * 21)


def test_prompts_that_cannot_be_used_are_refused_before_anything_runs() -> None:
    session = model("chat").session(max_prompt_tokens=100)
    size = model("chat").tokenizer.vocab_size
    for bad in ([-1], [size], [1 << 63], [True], [1.5], ["a"]):
        with pytest.raises(InputError):
            session.generate(bad)  # type: ignore[arg-type]
    for long in ([5] * 101, "a " * 10_000, "x" * 100_000_000):
        with pytest.raises(InputError, match="at most"):
            session.generate(long)
    with pytest.raises(InputError, match="Unicode"):
        session.generate("\ud800")
    with pytest.raises(InputError, match="temperature"):
        session.generate("a", temperature=-1)
    with pytest.raises(InputError, match=f"^logit_bias: token {size} is not"):
        session.generate("a", logit_bias={size: 1.0})
    assert session.tokens == ()
    assert session.generate("a", max_tokens=1).finish().finish_reason in ("length", "stop")


def test_an_empty_prompt_begins_with_bos_or_is_refused() -> None:
    session = model("chat").session()
    session.generate("", max_tokens=2, temperature=0, logit_bias={END: -99.0}).finish()
    assert session.tokens[0] == model("chat").tokenizer.bos
    for nothing in ("", None, []):
        with pytest.raises(InputError, match="empty"):
            model("bytes").session().generate(nothing)
    with pytest.raises(InputError, match="empty"):
        model("chat").session().generate([])


@pytest.mark.parametrize("at", range(0, 12))
def test_cancelling_at_every_step_keeps_session_and_answer_in_agreement(at: int) -> None:
    free = model("bytes").session().generate("the state", max_tokens=12, **HOT).finish()
    session = model("bytes").session()
    generation = session.generate("the state", max_tokens=12, **HOT)
    text = ""
    for count, piece in enumerate(generation):
        text += piece
        if count == at:
            session.cancel()
    result = generation.result
    assert result.tokens == free.tokens[: len(result.tokens)]
    assert text == result.text == model("bytes").tokenizer.decode(result.tokens)
    assert result.finish_reason in ("cancelled", "length")
    rest = 12 - len(result.tokens)
    if rest:
        more = session.generate(max_tokens=rest, temperature=5.0).finish()
        assert result.tokens + more.tokens == free.tokens


def test_cancelling_from_another_thread_ends_an_endless_answer() -> None:
    session = model("bytes").session()
    generation = session.generate("a", max_tokens=1 << 31, **HOT)
    started = threading.Event()

    def stop() -> None:
        started.wait()
        session.cancel()

    other = threading.Thread(target=stop)
    other.start()
    for _ in generation:
        started.set()
    other.join()
    assert generation.result.finish_reason == "cancelled"
    assert len(session.tokens) == len(generation.result.tokens)  # prompt 1, the last one pending


def test_cancelled_before_the_first_token_leaves_no_trace() -> None:
    session = model("bytes").session()
    session.generate("one", max_tokens=3, **HOT).finish()
    before = (session.tokens, session.pending)
    generation = session.generate("two " * 50, max_tokens=3)
    generation.cancel()
    result = generation.finish()
    assert result.finish_reason == "cancelled" and result.text == "" and result.tokens == ()
    assert (session.tokens, session.pending) == before
    # nor does one that was never started
    session.generate("three")
    assert (session.tokens, session.pending) == before
    assert session.undo_levels == 1


def test_a_deadline_gives_what_there_is() -> None:
    for deadline_s in (0.05, 1.0, 20.0):  # the first token may come too late on a busy machine
        session = model("bytes").session()
        generation = session.generate("a", max_tokens=1 << 31, deadline_s=deadline_s, **HOT)
        result = generation.finish()
        assert result.finish_reason == "deadline"
        if result.tokens:
            break
    assert len(session.tokens) == len(result.tokens) > 0
    # one whose deadline passes before the first token
    generation = session.generate("a" * 100_000, deadline_s=1e-9)
    assert generation.finish().finish_reason == "deadline"


@pytest.mark.parametrize("how", ["close", "drop"])
def test_an_abandoned_answer_stays_in_the_session(how: str) -> None:
    session = model("bytes").session()
    generation = session.generate("the", max_tokens=50, **HOT)
    for _ in range(4):
        next(generation)
    if how == "close":
        generation.close()
        generation.close()
        result = generation.result
        assert result.finish_reason == "cancelled"
        assert session.tokens == (*b"the", *result.tokens[:-1])
        assert list(generation) == []
    del generation
    state = session.snapshot().context.state
    assert state.position == len(session.tokens) >= 6
    assert session.generate(" more", max_tokens=2).finish().reused_tokens == state.position


def test_an_answer_abandoned_inside_a_character_says_what_it_holds() -> None:
    session = model("bytes").session()
    generation = session.generate("the", temperature=0, max_tokens=9, logit_bias={0xE2: 1000.0})
    assert next(generation) == "\ufffd"  # the first byte, decided by the second
    generation.close()
    result = generation.result
    assert result.tokens == (0xE2, 0xE2) and result.text == generation.text == "\ufffd\ufffd"


def test_one_answer_at_a_time_and_no_calls_from_inside_it() -> None:
    session = model("bytes").session()
    generation = session.generate("the", max_tokens=5, **HOT)
    for call in (session.undo, session.snapshot, session.reset, lambda: session.generate("x")):
        with pytest.raises(InputError, match="in progress"):
            call()
    next(generation)
    with pytest.raises(InputError, match="not finished"):
        _ = generation.result
    with pytest.raises(InputError, match="in progress"):
        session.save("nowhere")
    generation.close()
    session.reset()
    assert session.tokens == ()


def test_two_threads_in_one_session_is_an_error_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = model("bytes").session()
    generation = session.generate("the", max_tokens=1 << 31, **HOT)
    inside, release = threading.Event(), threading.Event()
    engine = session.model.engine
    real = engine.run

    def slow(*arguments: Any, **options: Any) -> np.ndarray:
        inside.set()
        release.wait()
        return real(*arguments, **options)

    next(generation)
    monkeypatch.setattr(engine, "run", slow)
    other = threading.Thread(target=lambda: next(generation))
    other.start()
    inside.wait()
    for call in (lambda: next(generation), session.undo, generation.close, session.reset):
        with pytest.raises(EngineError, match="thread"):
            call()
    session.cancel()
    release.set()
    other.join()
    generation.close()
    assert generation.result.finish_reason == "cancelled"


def test_an_error_in_the_middle_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    session = model("bytes").session()
    first = session.generate("one", max_tokens=3, **HOT).finish()
    before = (session.tokens, session.pending)
    generation = session.generate(" two", max_tokens=9, **HOT)
    next(generation)
    engine = session.model.engine
    real = engine.run

    def broken(*arguments: Any, **options: Any) -> np.ndarray:
        return np.full_like(real(*arguments, **options), np.nan)

    monkeypatch.setattr(engine, "run", broken)
    with pytest.raises(EngineError, match="logit"):
        list(generation)
    monkeypatch.undo()
    assert (session.tokens, session.pending) == before
    twin = model("bytes").session()
    assert twin.generate("one", max_tokens=3, **HOT).finish().tokens == first.tokens
    same = [s.generate(" two", max_tokens=5, **HOT).finish().tokens for s in (session, twin)]
    assert same[0] == same[1]


def test_concurrent_sessions_are_the_same_as_one_after_the_other() -> None:
    def talk(seed: int, out: dict[int, tuple[int, ...]]) -> None:
        session = model("chat").session(seed=seed)
        for text in ("hello", "and <|end|> then"):
            out[seed] = (
                out.get(seed, ())
                + session.chat(text, temperature=3.0, max_tokens=8).finish().tokens
            )

    serial: dict[int, tuple[int, ...]] = {}
    for seed in range(4):
        talk(seed, serial)
    together: dict[int, tuple[int, ...]] = {}
    threads = [threading.Thread(target=talk, args=(seed, together)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == serial and len(set(serial.values())) == 4


def test_names_of_embedded_models_and_engines() -> None:
    with pytest.raises(EngineError, match=r"(?i)cuda"):
        edge.load(bundle("bytes"), engine="cuda")
    with pytest.raises(BundleError, match="nosuch"):
        edge.load("nosuch")
    from edge.runtime.model import EMBEDDED, resolve

    for name in EMBEDDED:
        try:
            assert resolve(name).name == name
        except BundleError as problem:
            assert "not in this installation" in str(problem)
        assert str(resolve(f"./{name}")) == name


def test_options_that_cannot_be_used_are_all_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        model("bytes").session(
            sede=1, undo_levels=-1, seed=-1, window=0, draft_tokens=0, accept="top-0"
        )  # type: ignore[call-arg]
    said = str(caught.value)
    for name in ("'sede'", "'seed'", "undo_levels", "seed:", "window", "draft_tokens", "accept"):
        assert name in said, said


def test_undo_takes_back_only_what_there_is() -> None:
    session = model("bytes").session(undo_levels=2)
    with pytest.raises(StateError, match="nothing to undo"):
        session.undo()
    places = []
    for text in ("a", "b", "c"):
        places.append((session.tokens, session.pending))
        session.generate(text, max_tokens=2, **HOT).finish()
    session.undo()
    assert (session.tokens, session.pending) == places[2]
    session.undo()
    assert (session.tokens, session.pending) == places[1]
    with pytest.raises(StateError, match="turns kept: 2"):
        session.undo()


def test_a_base_model_says_that_it_cannot_chat() -> None:
    session: Session = model("base").session()
    with pytest.raises(TokenizerError, match="no chat template"):
        session.chat("hello")
    assert session.generate("hello", max_tokens=2).finish().tokens
