"""Constrained answers match the form with every kind of drafting, or are refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import edge
from edge.apps.bench import constrained
from edge.errors import EngineError, InputError
from edge.runtime.constrain import mask as grammars
from edge.runtime.constrain.mask import GrammarVocabulary, open_mask
from edge.runtime.constrain.statement import constraint_of
from edge.runtime.model import Model
from edge.runtime.session import Session
from edge.runtime.speculate.decode import Speculative
from edge.runtime.speculate.draft import NOTHING
from edge.text.spm import SentencePieceTokenizer
from edge.text.tokenizer import Tokenizer
from tests import constrained_outputs, text_samples
from tests.session_models import bundle, model
from tests.speculation_models import model as speculating

SCHEMA = {
    "type": "object",
    "properties": {
        "action": {"enum": ["move", "stop", "grasp"]},
        "speed": {"type": "integer", "minimum": 0, "maximum": 99},
        "why": {"type": "string", "maxLength": 12},
    },
    "required": ["action", "speed", "why"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"json_schema": SCHEMA}, r'\{"action": "\w+", "speed": \d+, "why": ".*"\}'),
    "regex": ({"regex": r"go (left|right) [0-9]{1,3} cm\."}, r"go (left|right) \d{1,3} cm\."),
    "grammar": ({"grammar": 'start: "(" item ("," item){1,3} ")"\nitem: /[ab]{1,3}/'},
                r"\([ab]{1,3}(,[ab]{1,3}){1,3}\)"),
    "choices": ({"choices": ["left", "right", "both hands", 'say "no"\n\\', "日本"]}, r"(?s).*"),
}  # fmt: skip
KINDS = ("chat", "base", "bytes", "hybrid")
PROMPT = "the state of the model"


def answered(session: Session, **sampling: Any) -> Any:
    return session.generate(PROMPT, max_tokens=400, **sampling).finish()


# -- always in the form ----------------------------------------------------------------------------


def test_answers_to_schemas_of_hypothesis_are_valid() -> None:
    answers, _ = constrained_outputs.run(24, 2)
    assert answers == 48


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_vocabulary_and_form(kind: str, form: str) -> None:
    given_form, pattern = FORMS[form]
    session = model(kind).session(capacity=64 if kind == "hybrid" else None)
    for seed in range(3):
        result = answered(session, temperature=2.0, seed=seed, **given_form)
        if result.finish_reason == "context":  # the hybrid has 64 positions
            assert kind == "hybrid"
        else:
            assert result.finish_reason == "stop", result.text
            assert re.fullmatch(pattern, result.text), result.text
        if form == "choices" and result.finish_reason == "stop":
            assert result.text in given_form["choices"]
        session.undo()


@settings(max_examples=25)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), min_size=1,
                max_size=6), st.sampled_from(["chat", "base"]))  # fmt: skip
def test_any_texts_may_be_choices(choices: list[str], kind: str) -> None:
    result = answered(model(kind).session(undo_levels=0), choices=choices, seed=1)
    assert result.text in choices and result.finish_reason == "stop"


def test_max_tokens_ends_it_and_says_so() -> None:
    result = model("base").session().generate(
        PROMPT, json_schema=SCHEMA, max_tokens=5, temperature=0
    ).finish()  # fmt: skip
    assert result.finish_reason == "length" and len(result.tokens) == 5
    assert result.text.startswith("{") and not result.text.endswith("}")


def test_an_answer_ends_with_its_grammar_and_no_token_later() -> None:
    # no end token is sampled where no continuation is possible
    result = answered(model("chat").session(), choices=["yes"], temperature=0)
    assert result.text == "yes" and not set(result.tokens) & set(model("chat").tokenizer.eos)
    # where one is, the model decides whether to go on
    found = {answered(model("chat").session(), choices=["go", "go on"], seed=seed,
                      temperature=50.0).text for seed in range(20)}  # fmt: skip
    assert found == {"go", "go on"}


def test_json_of_any_kind_and_a_pydantic_model_and_a_text() -> None:
    class Order(BaseModel):
        left: bool
        steps: int = 0

    for schema in (Order, json.dumps(Order.model_json_schema())):
        result = answered(model("bytes").session(), json_schema=schema, seed=4, temperature=0.5)
        assert Order.model_validate_json(result.text)
    result = answered(model("bytes").session(), json_schema={"type": "array", "maxItems": 0})
    assert json.loads(result.text) == []
    loose = open_mask(
        model("bytes").tokenizer, constraint_of({"json_schema": True}), continued=True
    )
    assert loose is not None and loose.within(list(b'[{"a": null}, 1.5e3]')) == 20


def test_the_layout_of_json_is_json_dumps_and_the_schema_may_ask_for_another() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [True, None]}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    assert answered(model("base").session(), json_schema=schema).text == (
        json.dumps({"a": 1, "b": [True, None]})
    )
    tight = schema | {"x-guidance": {"item_separator": ",", "key_separator": ":"}}
    assert answered(model("base").session(), json_schema=tight).text == '{"a":1,"b":[true,null]}'


def test_a_first_space_that_is_not_shown_is_not_asked_for() -> None:
    """Tokenizers that put a space before a text remove it from an answer again."""
    rng = np.random.default_rng(0)
    for name in ("spm-prefix", "spaced"):
        tokenizer = text_samples.tokenizer(name)
        assert tokenizer.strips_space
        for form, wanted in (({"choices": ["end", "of text"]}, r"end|of text"),
                             ({"regex": " ?the [a-c]{2}"}, r" ?the [a-c]{2}"),
                             ({"choices": [" the"]}, " the")):  # fmt: skip
            seen = set()
            for _ in range(12):
                ids = drawn(tokenizer, form, rng, continued=False)
                seen.add(tokenizer.token_bytes(ids[0])[:1] == b" ")
                assert re.fullmatch(wanted, tokenizer.decode(ids)), tokenizer.decode(ids)
            if not wanted.startswith(" "):
                assert seen == {True, False}


def drawn(
    tokenizer: Tokenizer, form: Mapping[str, Any], rng: np.random.Generator, *, continued: bool
) -> list[int]:
    """Return the ids of an answer by a model whose tokens are all equally likely."""
    mask = open_mask(tokenizer, constraint_of(form), continued=continued)
    assert mask is not None
    ids: list[int] = []
    while not mask.complete and (not ids or ids[-1] not in tokenizer.eos):
        noise = rng.standard_normal(tokenizer.vocab_size).astype(np.float32)
        ids.append(int(mask.allowed(noise).argmax()))
        mask.say(ids[-1])
    return [token for token in ids if token not in tokenizer.eos]


# -- lossless --------------------------------------------------------------------------------------


@cache
def twin(kind: str) -> Model:
    return edge.load(bundle(kind), threads=1)


def drafters(kind: str) -> dict[str, dict[str, Any]]:
    return {
        "ngram": {"draft": "ngram"},
        "chain": {"draft": twin(kind), "draft_tokens": 3},
        "auto": {"draft": twin(kind)},
        "text": {"draft": model("bytes" if kind != "bytes" else "base"), "draft_tokens": 4},
    }


@pytest.mark.parametrize("kind", ["chat", "base", "bytes"])
def test_greedy_answers_are_the_same_with_every_drafter(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain way is one token a step, without drafting forced tokens."""
    with monkeypatch.context() as patched:
        patched.setattr(Speculative, "forced", lambda self: NOTHING)
        plain = {name: answered(model(kind).session(), temperature=0, **form)
                 for name, (form, _) in FORMS.items()}  # fmt: skip
    for name, (form, _) in FORMS.items():
        for options in [{}, *drafters(kind).values()]:
            session = model(kind).session(**options)
            result = answered(session, temperature=0, **form)
            assert (result.tokens, result.text) == (plain[name].tokens, plain[name].text), options
            assert result.speculation is not None and not result.speculation.problem
            # state and transcript agree: the continuation is the same too
            after = session.generate(None, temperature=0, max_tokens=4).finish().tokens
            assert len(after) == 4 or after[-1] in model(kind).tokenizer.eos


def test_trees_are_drafted_within_the_grammar() -> None:
    target, draft = speculating("llama"), speculating("mamba")
    for temperature in (0, 1.5):
        plain = target.session(seed=1)
        form = FORMS["grammar"][0]
        expected = plain.generate(PROMPT, temperature=temperature, **form).finish()
        session = target.session(draft=draft, draft_tree=(3, 2, 1), seed=1)
        result = session.generate(PROMPT, temperature=temperature, **form).finish()
        assert re.fullmatch(FORMS["grammar"][1], result.text)
        assert result.speculation is not None and result.speculation.sources["model"].rounds
        if temperature == 0:
            assert result.tokens == expected.tokens


@pytest.mark.parametrize("draft", ["forced", "ngram", "model"])
def test_sampled_answers_are_distributed_as_without_drafting(draft: str) -> None:
    form = {"regex": "(the|of) (state|model|past)"}
    options = {"forced": {}, "ngram": {"draft": "ngram", "draft_tokens": 3},
               "model": {"draft": twin("chat"), "draft_tokens": 3}}[draft]  # fmt: skip

    def texts(first: int, **more: Any) -> list[str]:
        session = model("chat").session(undo_levels=1, **more)
        found = [answered(session, seed=first, temperature=3.0, **form).text]
        for seed in range(first + 1, first + 250):
            generation = session.regenerate(seed=seed, temperature=3.0, max_tokens=400, **form)
            found.append(generation.finish().text)
        return found

    drafted, plain = texts(10_000, **options), texts(0)
    for text in set(plain) | set(drafted):
        a, b = plain.count(text), drafted.count(text)
        assert abs(a - b) < 4.5 * (a + b + 1) ** 0.5, (text, a, b)


def test_forced_tokens_are_verified_in_one_run() -> None:
    result = answered(model("base").session(), json_schema=SCHEMA, temperature=0)
    said = result.speculation
    assert said is not None and said.drafter == "grammar" and said.accepted >= 12
    # the first token comes from the prompt's run; what follows the end is not used
    assert said.rounds + said.steps + said.accepted in (len(result.tokens) - 1, len(result.tokens))
    assert said.rounds + said.steps < len(result.tokens) / 2
    free = answered(model("base").session(), temperature=0, regex="[a-z]{9}").speculation
    assert free is not None and free.rounds == 0


def test_through_undo_regenerate_fork_save_and_load(tmp_path: Any) -> None:
    options = {"temperature": 1.0, "seed": 7, **FORMS["schema"][0], "max_tokens": 400}
    session = model("chat").session()
    first = session.chat("hello", **options).finish()
    assert session.regenerate(**options).finish().tokens == first.tokens
    free = session.regenerate(temperature=0, max_tokens=3).finish()
    assert free.tokens != first.tokens
    session.undo()
    assert session.chat("hello", **options).finish().tokens == first.tokens
    fork = session.snapshot()
    session.save(tmp_path / "talk.edge")
    second = session.chat("more", **options).finish()
    session.restore(fork)
    assert session.chat("more", **options).finish().tokens == second.tokens
    loaded = model("chat").session()
    loaded.load(tmp_path / "talk.edge")
    assert loaded.chat("more", **options).finish().tokens == second.tokens
    assert json.loads(loaded.messages[-1].content)


def test_a_cancelled_answer_leaves_a_session_that_goes_on() -> None:
    session = model("chat").session()
    generation = session.chat("hello", temperature=2.0, seed=2, **FORMS["schema"][0])
    next(generation)
    generation.close()
    assert generation.result.finish_reason == "cancelled"
    again = session.chat("hello", temperature=2.0, seed=2, choices=["a", "b"]).finish()
    assert again.text in ("a", "b")


def test_a_repetition_penalty_and_a_bias_do_not_break_the_form() -> None:
    tokenizer = model("base").tokenizer
    bias = dict.fromkeys(tokenizer.encode("zzz"), 100.0)
    result = answered(model("base").session(), regex="a{3}b", repetition_penalty=50.0,
                      logit_bias=bias, top_k=3, top_p=0.5, min_p=0.2)  # fmt: skip
    assert result.text == "aaab"


# -- the mask --------------------------------------------------------------------------------------


def test_the_mask_after_a_path_is_that_of_a_mask_that_said_it() -> None:
    tokenizer = model("base").tokenizer
    constraint = constraint_of({"regex": "(ab|ac|b[0-9]{2})+x"})
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    walked = open_mask(tokenizer, constraint, continued=True)
    assert walked is not None

    def after(text: str) -> np.ndarray:
        fresh = open_mask(tokenizer, constraint, continued=True)
        assert fresh is not None
        for token in spelled(tokenizer, text):
            fresh.say(token)
        return fresh.allowed(logits)

    for text in ("", "a", "abb", "ab", "b12", "b1", "", "b12ac", "acx"):
        np.testing.assert_array_equal(walked.allowed(logits, spelled(tokenizer, text)), after(text))
    assert walked.within(spelled(tokenizer, "abbz")) == 3
    for token in spelled(tokenizer, "abx"):
        assert not walked.complete
        walked.say(token)
    assert walked.complete
    # drafts may continue after the end, where nothing counts
    np.testing.assert_array_equal(walked.allowed(logits, spelled(tokenizer, "a")), logits)


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one token per letter."""
    return [token for letter in text for token in tokenizer.encode(letter)]


def test_a_token_outside_the_grammar_is_refused() -> None:
    tokenizer = model("base").tokenizer
    mask = open_mask(tokenizer, constraint_of({"choices": ["a"]}), continued=True)
    assert mask is not None
    with pytest.raises(EngineError, match="outside the grammar"):
        mask.say(tokenizer.encode("b")[0])


def test_control_tokens_are_no_text() -> None:
    tokenizer = model("chat").tokenizer
    mask = open_mask(tokenizer, constraint_of({"regex": r"(.|\n)*"}), continued=True)
    assert mask is not None
    allowed = np.isfinite(mask.allowed(np.zeros(tokenizer.vocab_size, np.float32)))
    shown = [bool(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
    ends = tokenizer.eos
    assert not allowed[[i for i, seen in enumerate(shown) if not seen and i not in ends]].any()
    assert allowed[list(tokenizer.eos)].all()


def test_compiled_grammars_are_kept_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = GrammarVocabulary(model("bytes").tokenizer)
    compile_, compiled = llguidance.LLMatcher, []

    def counted(*arguments: Any, **options: Any) -> Any:
        compiled.append(arguments)
        return compile_(*arguments, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", counted)

    def use(number: int) -> int:
        """Return how many grammars have been compiled after this one was asked for."""
        constraint = constraint_of({"choices": [str(number)]})
        assert constraint is not None
        vocabulary.mask(constraint, False)
        return len(compiled)

    count = grammars.KEPT + 8
    assert [use(number) for number in range(count)] == [*range(1, count + 1)]
    assert {use(number) for number in range(8, count)} == {count}, "kept"
    assert use(7) == count + 1, "gone"


# -- refusals --------------------------------------------------------------------------------------

REFUSED: Sequence[tuple[dict[str, Any], str]] = (
    ({"json_schema": {"type": "thing"}}, "json_schema: .*thing"),
    ({"json_schema": False}, "json_schema: .*false"),
    ({"json_schema": "{"}, "json_schema: is not JSON"),
    ({"json_schema": 3}, "json_schema: .*JSON schema, not int"),
    ({"json_schema": {"a": {1, 2}}}, "json_schema: .*cannot be written"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema: .*uniqueItems"),
    ({"json_schema": {"$ref": "#/nothing"}}, "json_schema: .*nothing"),
    ({"regex": "[a"}, "regex: .*regex parse error: unclosed character class"),
    ({"regex": ""}, "regex: .*text.*not empty"),
    ({"regex": "(?=a)b"}, "regex: "),
    ({"grammar": "start: x"}, 'grammar: .*unknown name: "x"'),
    ({"choices": []}, "choices: 0 texts"),
    ({"choices": "abc"}, "choices: must be a list"),
    ({"choices": ["a", ""]}, "choices.1: must be a text"),
    ({"choices": ["\ud800"]}, "choices.0: is not valid Unicode"),
    ({"choices": ["a"], "regex": "a"}, "regex: .*together with choices"),
    ({"regex": "a" * (1 << 20) + "b"}, "regex: has 1048577 characters"),
)


@pytest.mark.parametrize(("form", "message"), REFUSED)
def test_what_cannot_be_compiled_is_refused_before_anything_runs(
    form: dict[str, Any], message: str
) -> None:
    session = model("base").session()
    with pytest.raises(InputError, match=message):
        session.generate(PROMPT, **form)
    assert session.tokens == () and not session.busy


def test_other_faults_are_told_with_it() -> None:
    with pytest.raises(InputError, match=r"choices: 0 texts.*temperature: must be from 0"):
        model("base").session().generate(PROMPT, choices=[], temperature=-1)


def test_what_a_vocabulary_cannot_write_is_refused() -> None:
    narrow = SentencePieceTokenizer(text_samples.spm_model(byte_fallback=False, vocab_size=90))
    with pytest.raises(InputError, match=r"choices: .*cannot write"):
        open_mask(narrow, constraint_of({"choices": ["\u2603"]}), continued=True)
    mask = open_mask(narrow, constraint_of({"regex": "t(\u2603|\u2604)"}), continued=True)
    assert mask is not None
    mask.say(next(i for i in range(90) if narrow.token_bytes(i) == b"t"))
    with pytest.raises(InputError, match="regex: allows no next text"):
        mask.allowed(np.zeros(90, np.float32))


@pytest.mark.parametrize(
    "form",
    [  # answers that would never end
        {"json_schema": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]},
                                   "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
                         "$ref": "#/$defs/a"}},
        {"grammar": "start: a\na: b\nb: a"},
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_followed_is_the_askers_fault(form: dict[str, Any]) -> None:
    session = model("base").session()
    with pytest.raises(InputError, match=f"{next(iter(form))}: allows no next text"):
        session.generate(PROMPT, max_tokens=4, **form).finish()
    assert session.generate(PROMPT, max_tokens=2, choices=["a"]).finish().text == "a"


def test_what_compiling_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optional keys take quadratic time: a body of 1 MiB took a minute."""
    assert grammars.MAX_SYMBOLS <= 50_000
    monkeypatch.setattr(grammars, "MAX_SYMBOLS", 20_000)
    many = {f"key{number}": {"type": "string"} for number in range(10_000)}
    with pytest.raises(InputError, match=r"json_schema: .*too big"):
        open_mask(
            model("base").tokenizer,
            constraint_of({"json_schema": {"type": "object", "properties": many}}),
            continued=True,
        )


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": {"type": "integer", "multipleOf": 999_983}},
        {"json_schema": {"type": "number", "multipleOf": 0.999983}},
        {"json_schema": {"allOf": [{"multipleOf": 997}, {"type": "integer", "multipleOf": 991}]}},
        {"json_schema": {"items": {"properties": {"a": {"multipleOf": 1e300}}}}},
        {"json_schema": {"anyOf": [{"multipleOf": 50_000, "minimum": n} for n in range(99)]}},
        {"grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'},
        {"grammar": 'start: %json {"type": "integer", "multiple\\u004ff": 999983}'},
    ],
)
def test_what_dividing_takes_is_bounded(given: dict[str, Any]) -> None:
    """One state per remainder: a schema of fifty bytes took 10 seconds and 400 MB."""
    with pytest.raises(InputError, match="too large values of multipleOf"):
        open_mask(model("base").tokenizer, constraint_of(given), continued=True)


def test_numbers_are_divided_by_what_people_ask_for() -> None:
    parts = [0.01, 5, 100, 0.25, 12]
    properties = {f"p{i}": {"type": "number", "multipleOf": part} for i, part in enumerate(parts)}
    for schema in ({"type": "object", "properties": properties}, {"const": {"multipleOf": 7}}):
        given = constraint_of({"json_schema": schema})
        assert open_mask(model("base").tokenizer, given, continued=True) is not None


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = text_samples.spm_model()
    with pytest.raises(InputError, match=r"mamba-edge\[constrain\]"):
        open_mask(SentencePieceTokenizer(fresh), constraint_of({"regex": "a"}), continued=True)


# -- the bench -------------------------------------------------------------------------------------


def test_the_bench_measures_the_mask_and_the_jump() -> None:
    facts = constrained.masks(2000)
    assert all(found["tokens"] and found["median_us"] > 0 for found in facts["forms"].values())
    assert "per token, µs" in constrained.mask_table(facts).markdown()
    jumps = constrained.jumps(model("base"), rounds=1)
    assert all(found["same"] for found in jumps.values()) and jumps["choices"]["forced"]
    assert "yes" in constrained.jump_table(jumps, "base").markdown()
