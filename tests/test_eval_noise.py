"""Noise: the effect of each kind on a text, and that only what follows it is measured."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.apps import evaluate
from edge.apps.evaluate import noise
from edge.apps.evaluate.noise import KINDS, TextNoise, chosen, noisy_parts
from edge.apps.evaluate.parts import Encoder
from edge.apps.evaluate.score import RunReader, measure
from edge.apps.evaluate.texts import Dialogue, Stretch
from edge.apps.evaluate.windows import TextSource, Windows
from edge.errors import InputError
from edge.text.template import Message
from tests.session_models import bundle, model
from tests.test_eval_command import PROSE, here, write

LONG = "abcdefghij" * 5000
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


def spoilt(kind: str, text: str, p: float = 0.3, seed: int = 0) -> str:
    return KINDS[kind](text, p, random.Random(seed))


@pytest.mark.parametrize("p", [0.05, 0.3])
def test_drop_leaves_characters_out(p: float) -> None:
    left = spoilt("drop", LONG, p)
    assert re.sub("[^a]", "", left).count("a") == pytest.approx(5000 * (1 - p), rel=0.03)
    assert len(left) == pytest.approx(50000 * (1 - p), rel=0.02)
    rest = iter(LONG)
    assert all(c in rest for c in left)  # in order


@pytest.mark.parametrize("p", [0.05, 0.3])
def test_repeat_adds_one_to_three_each_as_likely(p: float) -> None:
    runs = Counter(len(match[0]) for match in re.finditer(r"(.)\1*", spoilt("repeat", LONG, p)))
    assert set(runs) == {1, 2, 3, 4} and sum(runs.values()) == 50000
    for length in (2, 3, 4):
        assert runs[length] == pytest.approx(50000 * p / 3, rel=0.1)


def test_antspeak_is_that_of_the_paper() -> None:
    assert spoilt("antspeak", "abc def") == " A B C D E F "
    assert spoilt("antspeak", " ß\n") == " S S "


@pytest.mark.parametrize("p", [0.05, 0.3])
def test_uppercase_raises_some(p: float) -> None:
    raised = spoilt("uppercase", LONG, p)
    assert raised.lower() == LONG
    assert sum(c.isupper() for c in raised) == pytest.approx(50000 * p, rel=0.05)


def test_random_case_sets_every_case() -> None:
    for text in (LONG, LONG.upper()):
        mixed = spoilt("random-case", text)
        assert mixed.lower() == LONG
        assert sum(c.isupper() for c in mixed) == pytest.approx(25000, rel=0.03)


@pytest.mark.parametrize("p", [0.05, 0.3])
def test_swap_moves_nothing_further_than_its_neighbour(p: float) -> None:
    swapped = spoilt("swap", LONG, p)
    moved, at = 0, 0
    while at < len(LONG):
        if swapped[at] == LONG[at]:
            at += 1
            continue
        assert swapped[at : at + 2] == LONG[at + 1] + LONG[at]
        moved, at = moved + 1, at + 2
    # of 50,000 places, a swap also takes the next one
    assert moved == pytest.approx(50000 * p / (1 + p), rel=0.05)


@given(text=TEXT, kind=st.sampled_from(sorted(KINDS)), p=st.floats(0, 1), seed=st.integers(0, 9))
def test_any_text_stays_text_and_a_seed_repeats(text: str, kind: str, p: float, seed: int) -> None:
    found = TextNoise(kind, p, seed).spoil(text, "0/1")
    found.encode()
    assert found == TextNoise(kind, p, seed).spoil(text, "0/1")
    if p == 0 and kind not in noise.WHOLE:
        assert found == text
    if kind == "swap":
        assert Counter(found) == Counter(text)


def test_places_and_seeds_have_numbers_of_their_own() -> None:
    text = "the quick brown fox jumps over the lazy dog " * 5
    found = {
        TextNoise("drop", 0.3, seed).spoil(text, place)
        for seed in (0, 1)
        for place in ("0/1", "0/3")
    }
    assert len(found) == 4


def test_odd_chunks_are_spoilt_and_even_ones_are_measured() -> None:
    """However the text is split into stretches, by the ids of a byte model."""
    tokenizer = model("bytes").tokenizer
    words = [f"w{i}" + (".\n" if i % 7 == 0 else "") for i in range(350)]
    text = "\n ".join(words) + "\n"
    second = "only few words"
    clean: list[str] = [
        " ".join(words[i : i + 100]).replace("\n ", "\n") for i in range(0, 350, 100)
    ]
    for cut in (len(text), 500, 37):
        stretches = [text[i : i + cut] for i in range(0, len(text), cut)]
        blocks = [Stretch(piece, i == 0) for i, piece in enumerate(stretches)]
        blocks.append(Stretch(second, True))
        for kind in (None, TextNoise("uppercase", 1.0)):
            parts = list(noisy_parts(kind, Encoder(tokenizer, None), blocks))
            read = ["".join(map(chr, part.ids)) for part in parts]
            assert [part.first for part in parts] == [True, False, False, False, True]
            assert [bool(p.wanted.any()) for p in parts] == [True, False, True, False, True]
            assert [p.words for p in parts] == [100, 0, 100, 0, 3]
            assert [p.bytes for p in parts] == [len(read[0]), 0, len(read[2]), 0, len(second)]
            assert [t.split() for t in read[:4:2]] == [c.split() for c in clean[:4:2]]
            whole = (
                text
                if kind is None
                else "".join(
                    t if i % 2 == 0 else t.upper() for i, t in enumerate(_cut_by_words(text))
                )
            )
            assert "".join(read) == whole + second


def _cut_by_words(text: str) -> list[str]:
    ends = [match.end() for match in re.finditer(r"\S+", text)][99::100]
    places = [0, *ends, len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def test_texts_without_a_chunk_to_spoil_are_refused() -> None:
    encoder = Encoder(model("bytes").tokenizer, None)
    short = [Stretch("word " * 200, True), Stretch("word " * 200, True)]
    with pytest.raises(InputError, match="200 words"):
        list(noisy_parts(None, encoder, short))
    with pytest.raises(InputError, match="conversations"):
        list(noisy_parts(None, encoder, [Dialogue((Message("user", "hi"),))]))


def test_choices_are_those_of_the_table() -> None:
    assert tuple(KINDS) == evaluate.KINDS
    rows = [(n.kind, n.probability) for n in chosen("all", None, 3)]
    assert rows == [
        ("drop", 0.05), ("drop", 0.3), ("repeat", 0.05), ("repeat", 0.3), ("antspeak", None),
        ("uppercase", 0.05), ("uppercase", 0.3), ("random-case", None),
        ("swap", 0.05), ("swap", 0.3),
    ]  # fmt: skip
    assert [n.seed for n in chosen("swap", 0.5, 3)] == [3]
    for bad in (("loud", None), ("antspeak", 0.5)):
        with pytest.raises(InputError):
            chosen(*bad, 0)


def test_the_command_measures_each_kind(tmp_path: Path) -> None:
    text = write(tmp_path, PROSE.read_text("utf-8")[:4000])
    code, out, err = here(bundle("bytes"), text, "--noise", "all", "--json", "--window", "400")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    rows = facts["noise"]
    assert [(r["kind"], r["probability"]) for r in rows] == [
        (n.kind, n.probability) for n in chosen("all", None, 0)
    ]
    # the predicted text is the same every time
    assert {(r["tokens"], r["bytes"], r["words"]) for r in rows} == {
        (facts["tokens"], facts["bytes"], facts["words"])
    }
    for row in rows:
        worse = row["word_perplexity"] - facts["word_perplexity"]
        assert row["degradation"] == pytest.approx(worse) and worse != 0
    limited = ("--noise", "all", "--json", "--max-tokens", "1500")
    facts = json.loads(here(bundle("bytes"), text, *limited)[1])
    assert {row["tokens"] for row in facts["noise"]} == {facts["tokens"]} == {1499}
    one = model("bytes")
    how = Windows(400, 200)
    parts: Callable[..., object] = partial(noisy_parts, TextNoise("swap", 0.3))
    tally = measure(RunReader(one.engine, how), TextSource([text], how).runs(one, parts))  # type: ignore[arg-type]
    assert rows[-1]["word_perplexity"] == pytest.approx(tally.word_perplexity, rel=1e-4)
    code, out, _ = here(bundle("bytes"), text, "--noise", "drop", "--probability", "0.5")
    assert code == 0 and "degradation" in out and re.search(r"\| drop +\| +0\.5 \|", out)


@pytest.mark.parametrize(
    "options",
    [
        ("--noise", "loud"),
        ("--noise", "antspeak", "--probability", "0.1"),
        ("--probability", "0.1"),
        ("--seed", "1"),
        ("--noise", "drop", "--against", "demo"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, out, err = here(bundle("bytes"), write(tmp_path, "word " * 300), *options)
    assert (code, out) == (2, "") and err.startswith("error: --") and err.count("\n") == 1
