"""Reused states: what they save, and that no answer changes because of them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import edge
from edge.apps.serve import slot as slot_module
from edge.apps.serve.slot import WORTH, KeptState, PrefixStore, Slot, agree, as_tokens
from edge.runtime.context import Consumed, Context, ContextMark
from edge.runtime.model import Model
from edge.runtime.parameters import SamplingParams
from edge.runtime.result import GenerationResult
from edge.text.template import Message
from tests.server_process import Server
from tests.session_models import model as tiny

MIB = 1 << 20
PLENTY = 64 * MIB
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SYSTEM = Message("system", "You are a friendly robot that lives in a small house by the sea.")
TURNS = ("Hello, how are you?", "What did you do today? Please tell me all of it.", "And then?")


@pytest.fixture(scope="module")
def demo() -> Model:
    return edge.load("demo", threads=1)


def slot(model: Model, cache_bytes: int = PLENTY) -> Slot:
    return Slot(model, capacity=None, cache_bytes=cache_bytes)


def answer(
    slot: Slot, tokens: list[int], params: SamplingParams = GREEDY, *, continued: bool = False
) -> GenerationResult:
    """Send one request; return the answer. Run and reused tokens must make up the prompt."""
    result = slot.begin(tokens, params, continued=continued).finish()
    assert 0 <= slot.reused < len(tokens)
    return result


def encode(model: Model, messages: list[Message]) -> list[int]:
    assert model.template is not None
    return model.template.encode(messages)


# -- the same answers (rows 30, 31) --------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["demo-fp16", "demo-draft", "demo-bytes", "hybrid", "chat", "bytes"]
)
@pytest.mark.parametrize("hot", [False, True], ids=["greedy", "sampled"])
def test_talks_in_any_order_say_what_they_say_alone(name: str, hot: bool) -> None:
    """Conversations interleaved, each turn compared with a slot that reads everything anew.

    The two differ by 1e-5 in their logits. A random draw falls between them once in a million
    tokens. (With int8 activations they differ by the rounding, and a conversation may diverge.)
    """
    short = name in ("hybrid", "chat", "bytes")  # tiny random models; hybrid has 64 positions
    model = tiny(name) if short else edge.load(name, threads=1)
    rng = random.Random(f"{name} {hot}")
    reusing, anew = slot(model), slot(model, 0)
    talks: list[list[Message]] = [[], [] if short else [SYSTEM], [] if short else [SYSTEM]]
    spared = 0
    for turn in range(9):
        talk = talks[0 if name == "hybrid" else rng.randrange(3)]
        text = "hi" if short else rng.choice(TURNS)
        if name == "hybrid" and len(talk) > 2:
            talk.clear()
        talk.append(Message("user", text))
        tokens = encode(model, talk)
        params = SamplingParams(
            temperature=1.0 if hot else 0.0, max_tokens=4 if short else 20, seed=100 + turn,
            stop=tuple(model.defaults["stop"]),
        )  # fmt: skip
        made = answer(reusing, tokens, params)
        judged = answer(anew, tokens, params)
        assert anew.reused == 0
        assert made.tokens == judged.tokens and made.text == judged.text
        spared += reusing.reused
        talk.append(Message("assistant", made.text))
    assert spared > 0


def test_over_the_wire_it_is_reported_and_changes_nothing() -> None:
    name = "demo-draft"  # activations are not rounded
    with Server(bundle=name) as server, Server("--cache-mib", "0", bundle=name) as anew:
        talk: list[Any] = [{"role": "system", "content": SYSTEM.content}]
        held = 0
        for text in TURNS:
            talk.append({"role": "user", "content": text})
            answers = [
                each.client().chat.completions.create(model=name, messages=talk, temperature=0)
                for each in (server, anew)
            ]
            said, judged = (each.choices[0].message.content for each in answers)
            usage, none = (each.usage for each in answers)
            assert said == judged and usage is not None and none is not None
            assert usage.prompt_tokens == none.prompt_tokens
            assert usage.prompt_tokens_details is not None
            assert none.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == held
            assert none.prompt_tokens_details.cached_tokens == 0
            # the last token, the end of the turn, has not been run
            held = usage.prompt_tokens + usage.completion_tokens - 1
            talk.append({"role": "assistant", "content": said})


# -- savings -------------------------------------------------------------------------------------


def test_a_talk_runs_only_what_is_new(demo: Model) -> None:
    here, talk, held = slot(demo), [SYSTEM], 0
    for text in TURNS:
        talk.append(Message("user", text))
        tokens = encode(demo, talk)
        result = answer(here, tokens)
        assert here.reused == held
        held = len(tokens) + len(result.tokens) - 1
        talk.append(Message("assistant", result.text))


def test_another_talk_in_between_costs_nothing(demo: Model) -> None:
    here = slot(demo)
    talk = [SYSTEM, Message("user", TURNS[0])]
    tokens = encode(demo, talk)
    result = answer(here, tokens, SamplingParams(temperature=0, max_tokens=24, logit_bias={6: -99}))
    answer(here, encode(demo, [Message("user", "Something else, about boats and the weather.")]))
    talk += [Message("assistant", result.text), Message("user", TURNS[1])]
    answer(here, encode(demo, talk))
    assert here.reused == len(tokens) + len(result.tokens) - 1


def test_the_same_prompt_again_and_a_changed_answer_go_on_from_the_prompt(demo: Model) -> None:
    here = slot(demo)
    talk = [SYSTEM, Message("user", TURNS[0])]
    tokens = encode(demo, talk)
    first = answer(here, tokens)
    assert answer(here, tokens).tokens == first.tokens
    assert here.reused == len(tokens) - 1
    changed = [*talk, Message("assistant", "I said no such thing."), Message("user", TURNS[1])]
    answer(here, encode(demo, changed))
    assert here.reused == len(tokens) - 1


def test_a_system_prompt_that_talks_share_is_read_twice_at_most(demo: Model) -> None:
    here = slot(demo)
    shared = agree(
        as_tokens(encode(demo, [SYSTEM, Message("user", "A b")])),
        as_tokens(encode(demo, [SYSTEM, Message("user", "1 2")])),
    )
    assert shared >= WORTH
    reused = []
    for text in ("A cat is a fine animal.", "1, 2, 3, 4, 5", "What is the name of the sea?"):
        answer(here, encode(demo, [SYSTEM, Message("user", text)]))
        reused.append(here.reused)
    assert reused[:2] == [0, 0] and reused[2] >= shared


def test_short_prompts_are_not_kept(demo: Model) -> None:
    here = slot(demo)
    answer(here, encode(demo, [Message("user", "Hi")]), SamplingParams(max_tokens=1))
    assert len(here.store) == 0


def test_a_cancelled_prompt_is_continued_where_it_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = edge.load("demo-draft", threads=1)
    here, anew = slot(model), slot(model, 0)
    tokens = model.tokenizer.encode("the cat sat on the mat and " * 200)
    real, runs = model.engine.run, []
    generation = here.begin(tokens, GREEDY, continued=True)

    def run(*arguments: Any, **options: Any) -> Any:
        runs.append(1)
        if len(runs) == 3:
            generation.cancel()
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(model.engine, "run", run)
        assert generation.finish().finish_reason == "cancelled"
    assert len(runs) == 3
    expected = answer(anew, tokens, continued=True)
    assert answer(here, tokens, continued=True).tokens == expected.tokens
    assert here.reused == 3 * model.engine.chunk


def test_after_a_failure_nothing_of_it_is_used(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = slot(demo)
    tokens = encode(demo, [SYSTEM, Message("user", TURNS[0])])
    real, runs = demo.engine.run, []

    def run(*arguments: Any, **options: Any) -> Any:
        runs.append(1)
        if len(runs) == 5:
            raise MemoryError
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(demo.engine, "run", run)
        patch.setattr(type(demo.engine), "finds_argmax", False, raising=False)
        with pytest.raises(MemoryError):
            answer(here, tokens)
    assert answer(here, tokens).tokens == answer(slot(demo, 0), tokens).tokens


# -- the store -----------------------------------------------------------------------------------


def mark(model: Model, tokens: list[int]) -> ContextMark:
    context = Context(model.engine, model.engine.new_state(window=1))
    context.feed(tokens, lambda: False)
    return context.mark()


def test_kept_states_stay_within_their_budget() -> None:
    model = edge.load("demo-draft", threads=1)
    one = mark(model, [5] * 8).state.nbytes
    store = PrefixStore(3 * one + 2000)
    for start in range(10):
        store.add(mark(model, [start + 8] * 8))
        assert store.nbytes <= store.budget and len(store) == min(start + 1, 3)
    assert store.longest(as_tokens([17] * 9)) is not None
    assert store.longest(as_tokens([8] * 9)) is None  # the oldest made room


def test_what_was_used_lately_stays() -> None:
    model = edge.load("demo-draft", threads=1)
    one = mark(model, [5] * 8).state.nbytes
    store = PrefixStore(2 * one + 2000)
    store.add(mark(model, [8] * 8))
    store.add(mark(model, [9] * 8))
    assert store.longest(as_tokens([8] * 9)) is not None
    store.add(mark(model, [10] * 8))
    assert store.longest(as_tokens([9] * 9)) is None
    assert store.longest(as_tokens([8] * 9)) is not None


def test_the_longest_beginning_is_found_and_one_token_is_left_to_run() -> None:
    model = edge.load("demo-draft", threads=1)
    store = PrefixStore(PLENTY)
    for tokens in ([7, 8, 9], [7, 8, 9, 10, 11], [7, 8, 9, 10, 12], [7]):
        store.add(mark(model, tokens))
    store.add(mark(model, [7, 8, 9]))  # the same again takes no more room
    assert len(store) == 4

    def longest(*wanted: int) -> list[int] | None:
        kept = store.longest(as_tokens(wanted))
        return None if kept is None else kept.tokens.tolist()

    assert longest(7, 8, 9, 10, 11, 5) == [7, 8, 9, 10, 11]
    assert longest(7, 8, 9, 10, 11) == [7, 8, 9]
    assert longest(7, 8, 5) == [7]
    assert longest(7) is None and longest(8, 7) is None
    assert store.shared(as_tokens([7, 8, 9, 10, 99])) == 4


def test_a_budget_below_one_state_copies_none_and_still_goes_on(demo: Model) -> None:
    here, talk = slot(demo, 1000), [SYSTEM, Message("user", TURNS[0])]
    tokens = encode(demo, talk)
    result = answer(here, tokens)
    assert len(here.store) == 0
    talk += [Message("assistant", result.text), Message("user", TURNS[1])]
    answer(here, encode(demo, talk))
    assert here.reused == len(tokens) + len(result.tokens) - 1


def test_the_index_finds_what_a_search_of_all_finds() -> None:
    """Thousands of states of random tokens with common beginnings, some dropped on the way."""
    chosen = random.Random(0)
    state: Any = SimpleNamespace(nbytes=100)
    store = PrefixStore(100 * 400 + 48 * 2000)
    kept: dict[tuple[int, ...], int] = {}  # tokens → bytes, the most recently used last

    def one() -> list[int]:
        return [chosen.choice((1, 2, 300)) for _ in range(chosen.randrange(1, 9))]

    for _ in range(800):
        tokens = tuple(one())
        mark = ContextMark(state, Consumed(tokens))
        store.add(mark)
        kept.pop(tokens, None)
        kept[tokens] = KeptState(as_tokens(tokens), mark).nbytes
        while sum(kept.values()) > store.budget:
            del kept[next(iter(kept))]
        assert len(store) == len(kept) > 0 and store.nbytes == sum(kept.values())
        wanted = tuple(one())
        begins = [each for each in kept if each == wanted[: len(each)] and each != wanted]
        longest = max(begins, key=len, default=None)
        found = store.longest(as_tokens(wanted))
        assert (None if found is None else tuple(found.tokens.tolist())) == longest
        if longest is not None:
            kept[longest] = kept.pop(longest)
        shared = max(
            next((i for i, (a, b) in enumerate(zip(each, wanted, strict=False)) if a != b),
                 min(len(each), len(wanted)))
            for each in kept
        )  # fmt: skip
        assert store.shared(as_tokens(wanted)) == shared


def test_finding_takes_as_long_among_many_as_among_few() -> None:
    """Counts comparisons, not time."""
    state: Any = SimpleNamespace(nbytes=1)
    counts = []
    for many in (10, 3000):
        store = PrefixStore(1 << 40)
        for i in range(many):
            store.add(ContextMark(state, Consumed((*[7] * 20, i, i, i))))
        with patch.object(slot_module, "agree", wraps=agree) as comparing:
            assert store.shared(as_tokens([7] * 20 + [5, 6])) == 21
            assert store.longest(as_tokens([7] * 20 + [5, 6])) is None
        counts.append(comparing.call_count)
    assert counts[1] <= counts[0] + 2
