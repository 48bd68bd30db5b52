"""Streamed text: the pieces join to the whole, and a stop string never shows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import InputError
from edge.text.stream import StopMatcher, StreamDecoder
from tests.text_samples import CORPUS, KINDS, tokenizer


def streamed(kind: str, ids: list[int], continued: bool) -> list[str]:
    decoder = StreamDecoder(tokenizer(kind), continued=continued)
    return [*(decoder.feed(token) for token in ids), decoder.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_pieces_of_any_ids_join_to_the_decoded_whole(kind: str, data: st.DataObject) -> None:
    tok = tokenizer(kind)
    # byte pieces make broken UTF-8 likely
    low = st.integers(0, min(280, tok.vocab_size - 1))
    ids = data.draw(st.lists(low | st.integers(0, tok.vocab_size - 1), max_size=24))
    for continued in (False, True):
        assert "".join(streamed(kind, ids, continued)) == tok.decode(ids, continued=continued)


@pytest.mark.parametrize("kind", KINDS)
def test_every_split_of_real_text(kind: str) -> None:
    tok = tokenizer(kind)
    ids = tok.encode(" ".join(CORPUS) + " é東🦾")
    whole = tok.decode(ids)
    for cut in range(len(ids) + 1):
        decoder = StreamDecoder(tok)
        shown = "".join(decoder.feed(token) for token in ids[:cut])
        # shown text never changes afterwards, and at most one character is held back
        assert whole.startswith(shown)
        text = shown + decoder.finish()
        assert len(text) - len(shown) <= 1
        assert text == tok.decode(ids[:cut])


def test_bytes_that_are_no_text_become_replacement_characters_at_once() -> None:
    decoder = StreamDecoder(tokenizer("bytes"))
    assert [decoder.feed(b) for b in b"\xf0\x9f\xa6\xbe"] == ["", "", "", "🦾"]
    assert [decoder.feed(b) for b in b"\xf0\x9fA"] == ["", "", "\ufffdA"]
    assert [decoder.feed(b) for b in b"\xff"] == ["\ufffd"]
    decoder.feed(0xE2)
    assert decoder.finish() == "\ufffd"


def naive_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read character by character; at the first end of a stop string, cut off the longest one."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


@given(
    text=st.text("ab c", max_size=30),
    stops=st.lists(st.text("ab c", min_size=1, max_size=5), max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=400)
def test_stops_match_the_plain_definition(text: str, stops: list[str], seed: int) -> None:
    rng = random.Random(seed)
    matcher, shown, at = StopMatcher(stops), "", 0
    expected, found = naive_stop(text, stops)
    while at < len(text):
        step = rng.randint(1, 4)
        shown += matcher.feed(text[at : at + step])
        at += step
        assert expected.startswith(shown)
        # decided text is not held back
        possible = max([0, *(len(stop) - 1 for stop in stops)])
        assert matcher.stopped or len(text[:at]) - len(shown) <= possible
    shown += matcher.finish()
    assert (shown, matcher.stopped) == (expected, found)


@pytest.mark.parametrize(
    "stops", [[""], [1], ["a"] * 1 + ["b" * 2000], [str(i) for i in range(99)]]
)
def test_bad_stops_are_refused(stops: list[str]) -> None:
    with pytest.raises(InputError, match="stop"):
        StopMatcher(stops)


def test_one_string_is_one_stop() -> None:
    assert StopMatcher("end").stops == ("end",)
    assert StopMatcher(["a", "a"]).stops == ("a",)
