"""Special tokens are found as a regular expression finds them, in time linear in the text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import TokenizerError
from edge.text import specials
from edge.text.hf import HfTokenizer
from edge.text.specials import SpecialFinder, SpecialToken
from edge.text.spm import SentencePieceTokenizer
from edge.text.template import ChatTemplate, Message
from tests.text_samples import byte_level, spm_model

# few characters, so that tokens begin, end, contain and repeat each other
SPELLINGS = st.text(alphabet="ab<  \n\u3000", min_size=1, max_size=4)
TOKENS = st.lists(
    st.tuples(SPELLINGS, st.booleans(), st.booleans()), max_size=6, unique_by=lambda t: t[0]
).map(lambda made: [SpecialToken(text, i, (a, b)) for i, (text, a, b) in enumerate(made)])


def by_expression(tokens: list[SpecialToken], text: str) -> list[tuple[int, int, SpecialToken]]:
    parts = [
        (r"\s*" if token.strips[0] else "")
        + f"(?P<s{token.id}>{re.escape(token.text)})"
        + (r"\s*" if token.strips[1] else "")
        for token in sorted(tokens, key=lambda token: -len(token.text))
    ]
    found = re.finditer("|".join(parts), text) if parts else ()
    return [(m.start(), m.end(), tokens[int(str(m.lastgroup)[1:])]) for m in found]


@given(tokens=TOKENS, text=st.text(alphabet="ab<  \n\u3000c", max_size=24))
@settings(max_examples=800)
def test_finds_what_an_expression_finds(tokens: list[SpecialToken], text: str) -> None:
    assert list(SpecialFinder(tokens).find(text)) == by_expression(tokens, text)


@given(tokens=TOKENS, text=st.text(alphabet="ab<  \n\u3000c", max_size=24))
@settings(max_examples=300)
def test_nothing_is_found_in_a_text_broken_at_every_start(
    tokens: list[SpecialToken], text: str
) -> None:
    finder = SpecialFinder(tokens)
    starts = set(finder.starts(text))
    broken = "".join(c + "\uf000" if i in starts else c for i, c in enumerate(text))
    assert all(len(token.text) == 1 for _, _, token in finder.find(broken))
    assert all(any(text.startswith(t.text, i) for t in tokens if len(t.text) > 1) for i in starts)


def with_specials(spellings: list[str], lstrip: bool = False) -> HfTokenizer:
    data = json.loads(byte_level())
    first = 1 + max([*data["model"]["vocab"].values(), *(t["id"] for t in data["added_tokens"])])
    data["added_tokens"] += [
        {"id": first + i, "content": text, "special": True, "normalized": False,
         "single_word": False, "lstrip": lstrip, "rstrip": False}
        for i, text in enumerate(spellings)
    ]  # fmt: skip
    return HfTokenizer(json.dumps(data).encode())


MANY = [f"<x{i}>" for i in range(5000)]
SLOW: dict[str, Callable[[], object]] = {
    "space before a token": lambda: with_specials(["<x>"], True).find_specials(" " * 1_000_000),
    "spaces and tokens": lambda: SpecialFinder(
        [SpecialToken("    ", 0), SpecialToken("<x>", 1, (True, True)),
         SpecialToken(" \n", 2, (True, False))]
    ).find(" " * 400_000 + "<x>"),
    "tokens of one beginning": lambda: SpecialFinder(
        [SpecialToken("<" * i + "x", i) for i in range(1, 256)]
    ).find("<" * 200_000),
    "tokens in each other": lambda: SpecialFinder(
        [SpecialToken("a" + "b" * i, i, (True, False)) for i in range(1, 256)]
    ).find("abc" * 60_000),
    "many tokens": lambda: with_specials(MANY).find_specials("<" * 200_000),
    "loading many": lambda: with_specials([f"<x{i}>" for i in range(60_000)]).encode("a"),
    "typed text": lambda: ChatTemplate(
        "{{ messages[0].content | upper }}", with_specials(MANY)
    ).encode([Message("user", "hi <x1" * 15_000)]),
    "trusted text": lambda: ChatTemplate(
        "{{ ' ' * 200000 }}{{ messages[0].content }}", with_specials(["<x>"], True)
    ).encode([Message("user", "hi")]),
}  # fmt: skip


@pytest.mark.parametrize("case", SLOW)
def test_the_time_grows_with_the_text_only(case: str) -> None:
    began = time.process_time()
    made = SLOW[case]()
    if not isinstance(made, list):
        list(made)  # type: ignore[call-overload]
    assert time.process_time() - began < 10


@pytest.mark.parametrize("name", ["MAX_SPECIALS", "MAX_SPECIAL", "MAX_ALL_SPECIALS"])
@pytest.mark.parametrize("kind", ["tokenizer.json", "sentencepiece"])
def test_too_many_or_too_long_special_tokens_are_refused(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"tokenizer.json": HfTokenizer, "sentencepiece": SentencePieceTokenizer}[kind]
    data = byte_level() if kind == "tokenizer.json" else spm_model()
    assert made(data).specials
    monkeypatch.setattr(specials, name, 3)
    with pytest.raises(TokenizerError, match=r"special token.*at most 3"):
        made(data)
