"""Constrained answers of the C library: choices, and any library's grammar through callbacks."""

from __future__ import annotations

import ctypes as c
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge
from edge.bundle import open_bundle
from edge.runtime.constrain.mask import GrammarVocabulary
from edge.runtime.constrain.statement import constraint_of
from edge.text.load import load_tokenizer
from edge.text.spm import SentencePieceTokenizer
from edge.text.tokenizer import Tokenizer
from tests import libedge
from tests.facts import facts
from tests.libedge import Accept, Allow, CBundle, CChoices, CModel, Constraint, EdgeFault
from tests.test_libedge import compiled, folder, native
from tests.test_libedge_sessions import prompt
from tests.test_libedge_text import trained, with_file, with_tokenizer
from tests.text_samples import spm_model

llguidance = pytest.importorskip("llguidance")
pytestmark = compiled

TEXTS = (
    ["yes", "no"],
    ["left", "left turn", "right"],
    ["Hello there", "Hi", "Hi, my friend"],
    ["é", "ébène", "日本", "日"],
)


def python_answer(name: str, texts: list[str]) -> str:
    session = edge.load(name, engine="cpu", threads=1).session()
    return session.generate(prompt(name), choices=texts, temperature=0).finish().text


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("name", ["demo", "demo-bytes"])
def test_choices_are_those_of_python(name: str, texts: list[str]) -> None:
    model = native(name)
    choices = CChoices(model.bundle, texts)
    said, result = model.session().generate(prompt(name), constraint=choices.begin())
    assert model.bundle.decode(said).decode() == texts[choices.found] == python_answer(name, texts)
    assert result.finish == libedge.STOP


def bundle_of(kind: str, where: Path) -> Path:
    """Return a bundle with a tokenizer of this kind."""
    if kind.startswith("demo"):
        return folder(kind)
    if kind == "spm-prefix":
        model = spm_model(add_dummy_prefix=True)
        size = SentencePieceTokenizer(model, eos=(6,)).vocab_size
        with_file(where, "tokenizer.model", model, size, eos=6)
    else:
        with_tokenizer(where, trained(kind))
    return where


def inside_character(tokenizer: Tokenizer, tokens: list[int]) -> bool:
    try:
        b"".join(map(tokenizer.token_bytes, tokens)).decode()
    except UnicodeDecodeError:
        return True
    return False


@pytest.mark.parametrize("kind", ["demo", "demo-bytes", "smollm2", "spm-prefix"])
def test_what_may_follow_is_what_python_lets_follow(kind: str, tmp_path: Path) -> None:
    """Token by token, with the one that Python would force where texts go on alike."""
    where = bundle_of(kind, tmp_path)
    with open_bundle(where) as opened:
        tokenizer = load_tokenizer(opened)
    vocabulary, bundle = GrammarVocabulary(tokenizer), CBundle(where)
    size = tokenizer.vocab_size
    rng = random.Random(size)
    words = ["turn ", "left", "let", "lift ", "a", "the", " robot", "日本", "日", "é", "è", "12"]
    made = [
        sorted({"".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 5))})
        for _ in range(25)
    ]
    for texts in (*TEXTS, ["aa", "a", "aaaa" * 30], [" a", "b"], *made):
        choices, given = CChoices(bundle, texts), constraint_of({"choices": texts})
        assert given is not None
        for _ in range(4):
            mask = vocabulary.mask(given, tokenizer.strips_space)
            form = choices.begin().contents
            said: list[int] = []
            split = False
            while not mask.complete:
                may = np.flatnonzero(mask.allowed(np.zeros(size, "f4")) == 0).tolist()
                bits = np.zeros(-(-size // 32), np.uint32)
                pointer = bits.ctypes.data_as(c.POINTER(c.c_uint32))
                assert form.allow(form.user, pointer, len(bits)) == 0
                found = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
                usual = mask.forced(1) or may
                # after a part of a character, Python splits the rest of the text otherwise
                split = split or inside_character(tokenizer, said)
                assert split or found.tolist() == usual, (texts, said)
                said.append(rng.choice(usual))
                mask.say(said[-1])
                assert form.accept(form.user, said[-1]) == mask.complete
            assert texts[choices.found] == tokenizer.decode(said)


def test_every_text_can_be_chosen_and_nothing_else() -> None:
    """At a high temperature, with a mask of the caller's that rules one of them out."""
    model, texts = native("demo"), TEXTS[1]
    choices, seen = CChoices(model.bundle, texts), set()
    session = model.session()
    words = -(-model.vocab // 32)
    mask = np.full(words, 2**32 - 1, np.uint32)
    for seed in range(60):
        hot: dict[str, Any] = {"temperature": 30, "has_seed": 1, "seed": seed}
        session.do("clear")
        said, _ = session.generate(prompt("demo"), sampling=hot, constraint=choices.begin())
        assert model.bundle.decode(said).decode() == texts[choices.found]
        seen.add(choices.found)
    assert seen == {0, 1, 2}
    for token in range(model.vocab):
        if model.bundle.decode([token]).startswith(b"l"):
            mask[token // 32] &= ~np.uint32(1 << token % 32)
    hot |= {"allowed": mask.ctypes.data_as(c.POINTER(c.c_uint32)), "allowed_words": words}
    session.do("clear")
    session.generate(prompt("demo"), sampling=hot, constraint=choices.begin())
    assert texts[choices.found] == "right"


def test_an_answer_that_ends_early_is_no_text() -> None:
    choices = CChoices(native("demo").bundle, ["internationalization"])
    said, result = (
        native("demo").session().generate(prompt("demo"), constraint=choices.begin(), max_tokens=2)
    )
    assert result.finish == libedge.LENGTH and choices.found == -1 and len(said) == 2


def grammar(model: CModel, schema: str) -> tuple[Constraint, Callable[[], object]]:
    """Return a constraint that llguidance checks, as a program in C would use its library."""
    tokenizer = edge.load("demo", engine="cpu", threads=1).tokenizer
    own = GrammarVocabulary(tokenizer).tokenizer
    matcher = llguidance.LLMatcher(own, llguidance.LLMatcher.grammar_from_json_schema(schema))

    def allow(_: object, mask: object, words: int) -> int:
        if matcher.is_stopped():
            return 1
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        room = np.ctypeslib.as_array(mask, (words,))
        room[: bits.size] = bits[:words]
        return 0

    def accept(_: object, token: int) -> int:
        return 0 if matcher.consume_token(token) else 7

    return Constraint(allow=Allow(allow), accept=Accept(accept)), matcher.get_error


def test_a_schema_through_callbacks() -> None:
    schema = {
        "x-guidance": {"whitespace_flexible": False},
        "type": "object", "required": ["go"], "additionalProperties": False,
        "properties": {"go": {"enum": ["left", "right"]}, "cm": {"type": "integer",
                                                                "minimum": 0, "maximum": 99}},
    }  # fmt: skip
    model = native("demo")
    for seed in range(8):
        constraint, error = grammar(model, json.dumps(schema))
        said, result = model.session().generate(
            prompt("demo"), sampling={"temperature": 2, "has_seed": 1, "seed": seed},
            constraint=c.pointer(constraint), max_tokens=400,
        )  # fmt: skip
        assert result.finish == libedge.STOP, error()
        value = json.loads(model.bundle.decode(said))
        assert value["go"] in ("left", "right") and set(value) <= {"go", "cm"}


@pytest.mark.parametrize(
    ("allow", "accept", "message"),
    [
        (lambda u, m, n: 0, lambda u, t: 0, "no id may be sampled"),
        (lambda u, m, n: 5, lambda u, t: 0, "failed to allow ids, with 5"),
        (lambda u, m, n: m.__setitem__(0, 0xFFFFFFFF) or 0, lambda u, t: -3, "accept a token"),
    ],
)
def test_a_constraint_that_fails_leaves_a_session_that_works(
    allow: Callable[..., int], accept: Callable[..., int], message: str
) -> None:
    session = native("demo").session()
    constraint = Constraint(allow=Allow(allow), accept=Accept(accept))
    with pytest.raises(EdgeFault, match=message) as caught:
        session.generate(prompt("demo"), constraint=c.pointer(constraint))
    assert caught.value.status == libedge.INPUT
    session.do("clear")
    said, _ = session.generate(prompt("demo"), max_tokens=4)
    assert len(said) == 4


def test_what_is_refused() -> None:
    model = native("demo")
    with pytest.raises(EdgeFault, match=facts("empty; ", "texts.2: ", 4096)):
        CChoices(model.bundle, ["a", "", "b" * 5000])
    with pytest.raises(EdgeFault, match="must have 1 to 1000 texts"):
        CChoices(model.bundle, [])
    with pytest.raises(EdgeFault, match=facts("callback", "NULL")):
        model.session().generate(prompt("demo"), constraint=c.pointer(Constraint()))
    constraint = CChoices(model.bundle, ["yes"])
    given = constraint.begin().contents

    def anything(_: object, mask: object, words: int) -> int:
        np.ctypeslib.as_array(mask, (words,))[:] = 2**32 - 1
        return 0

    other = Constraint(allow=Allow(anything), accept=given.accept, user=given.user)
    with pytest.raises(EdgeFault, match="failed to accept a token, with -1") as caught:
        model.session().generate(prompt("demo"), constraint=c.pointer(other))
    assert caught.value.status == libedge.INPUT
