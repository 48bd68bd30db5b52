"""Drafts by a model with another tokenizer, through text: still the target's own words."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edge
from edge.errors import InputError
from edge.export.exporter import export_checkpoint
from edge.runtime.model import Model
from edge.runtime.session import Session
from edge.runtime.speculate.draft import Draft
from edge.runtime.speculate.text import (
    Pieces,
    Transcript,
    agreement,
    begins_word,
    spelled,
    whole_characters,
    writes_text,
)
from edge.runtime.speculate.text_drafter import BACK, TextDrafter
from tests.session_models import model
from tests.speculate_samples import third_tokens_are_alike
from tests.speculation_models import check_same, read_lengths
from tests.text_samples import byte_level, tokenizer
from tests.transformers_checkpoints import save_mamba

KINDS = ["bytes", "spm", "spm-prefix", "spm-unigram", "byte-level", "spaced", "unigram"]
TEXT = "the state of Größe, 東京 and 🦾: 12  steps\n\n <and> robot"


# -- text ------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_a_transcript_is_the_text_of_its_tokens_however_they_change(
    kind: str, data: st.DataObject
) -> None:
    own = tokenizer(kind)
    plain = st.integers(0, own.vocab_size - 1).filter(lambda token: own.token_bytes(token))
    followed = Transcript(own)
    tokens: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        before = bytes(followed.data)
        tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
        tokens += data.draw(st.lists(plain, max_size=8))
        stayed = followed.follow(tokens)
        assert followed.tokens == tokens and followed.data[:stayed] == before[:stayed]
        assert followed.data.decode(errors="replace") == own.decode(tokens)
        fresh = Transcript(own)
        fresh.follow(tokens)
        assert (fresh.ends, fresh.data) == (followed.ends, followed.data)
        for size in range(len(followed.data) + 1):
            count = followed.tokens_within(size)
            assert followed.end(count) <= size
            assert count == len(tokens) or followed.end(count + 1) > size


def test_a_control_token_ends_a_line_but_does_not_begin_a_text() -> None:
    own = tokenizer("spm-prefix")
    end, begin = 6, 1
    assert own.token_bytes(end) == own.token_bytes(begin) == b""
    said = own.encode("the state")
    followed = Transcript(own, control=b"\n")
    followed.follow([begin, *said, end, *said])
    assert bytes(followed.data) == b"the state\n the state"


def test_characters_that_are_not_finished_are_found() -> None:
    data = TEXT.encode()
    for size in range(len(data) + 1):
        whole = max(n for n in range(size + 1) if _decodes(data[:n]))
        assert whole_characters(data[:size]) == whole


def _decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_spelled_exactly_or_not_at_all(kind: str) -> None:
    own = tokenizer(kind)
    assert writes_text(own)
    first = spelled(own, TEXT, None)
    assert first is not None and own.decode(first) == TEXT
    for text in ("ot walks", " robot", "  two", "\nline", "é"):
        after = spelled(own, text, first[-1])
        assert after is not None
        assert b"".join(map(own.token_bytes, after)) == text.encode()


def test_a_tokenizer_that_loses_text_is_known() -> None:
    lossy = tokenizer("byte-level-words")
    assert not writes_text(lossy) and spelled(lossy, "a  b", None) is None


@pytest.mark.parametrize("kind", ["spm", "byte-level"])
def test_pieces_along_a_text(kind: str) -> None:
    own = tokenizer(kind)
    pieces = Pieces(own)
    every = {token: own.token_bytes(token) for token in range(own.vocab_size)}
    for text in (b" th", b"s", b" thxq", b"\xe6\x9d", b" zq"):
        found = {every[token] for token in pieces.along(text).tolist()}
        longer = {piece for piece in every.values() if piece.startswith(text)}
        shorter = [piece for piece in every.values() if piece and text.startswith(piece)]
        assert found == (longer or {max(shorter, key=len)})


def test_agreement_and_words() -> None:
    a, b = bytearray(b"the state"), bytearray(b"the stone age")
    assert [agreement(a, b, known) for known in (0, 4, 6)] == [6, 6, 6]
    assert agreement(a, bytearray(), 5) == 0
    assert [at for at in range(len(b) + 1) if begins_word(b, at)] == [0, 3, 9]


# -- sessions --------------------------------------------------------------------------------------

# target, drafter: words for bytes, bytes for words, words for other words
PAIRS = [("demo-bytes", "base"), ("base", "bytes"), ("chat", "base"), ("hybrid", "bytes")]


@cache
def demo(name: str) -> Model:
    return edge.load(name, threads=1)


def _model(name: str) -> Model:
    """Return a trained model, whose bytes are text, or one of tests/session_models.py."""
    return demo(name) if name.startswith("demo") else model(name)


def _sessions(
    target: Model, drafter: Model, tokens: int | None = 5, **options: object
) -> tuple[Session, Session]:
    plain = target.session(seed=3, **options)
    drafting = target.session(draft=drafter, draft_tokens=tokens, seed=3, **options)
    assert isinstance(_drafter(drafting), TextDrafter)
    return plain, drafting


def _drafter(session: Session) -> TextDrafter:
    assert session.drafting is not None
    drafter = session.drafting.drafter
    assert isinstance(drafter, TextDrafter)
    return drafter


def _watched(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """Record every draft, checking that the drafter has read the target's text each time."""
    drafter, drafts = _drafter(session), []
    real = drafter.propose

    def watched(*arguments: object) -> Draft:
        draft = real(*arguments)  # type: ignore[arg-type]
        heard, said = drafter.heard, drafter.said
        assert heard.tokens == [*arguments[0], arguments[1]]  # type: ignore[misc]
        assert said.tokens == drafter.context.tokens
        assert said.data[: drafter.agreed] == heard.data[: drafter.agreed]
        if draft.tokens:
            unread = len(heard.data) - drafter.agreed
            assert unread < 24, "all but a word that has begun"
            following = Transcript(drafter.target, control=b"\n")
            following.follow([*heard.tokens, *draft.tokens])
            both = min(len(following.data), len(said.data))
            assert following.data[:both] == said.data[:both], "the draft is what it said"
        drafts.append(draft)
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    return drafts


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_greedy_words_and_states_are_those_without_drafting(
    target: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafting = _sessions(_model(target), _model(drafter))
    drafts = _watched(drafting, monkeypatch)
    for prompt in ("the state of the robot", " and 東京 then", " it stops"):
        results = [
            session.generate(prompt, temperature=0, max_tokens=9).finish()
            for session in (plain, drafting)
        ]
        assert results[0].tokens == results[1].tokens and results[0].text == results[1].text
        check_same(plain, drafting)
    assert any(draft.tokens for draft in drafts)


@pytest.mark.parametrize(
    ("target", "drafter", "least"), [("demo-bytes", "demo-draft", 3.0), ("demo", "demo-bytes", 1.2)]
)
def test_trained_models_draft_for_each_other(
    target: str, drafter: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafting = _sessions(demo(target), demo(drafter), 6)
    _watched(drafting, monkeypatch)
    read = read_lengths(_drafter(drafting), monkeypatch)
    rounds = accepted = steps = 0
    for prompt in ("Hello, how are you?", "What do you like to do?"):
        results = [
            session.chat(prompt, temperature=0, max_tokens=48).finish()
            for session in (plain, drafting)
        ]
        assert results[0].tokens == results[1].tokens
        figures = results[1].speculation
        assert figures is not None and figures.problem == ""
        rounds, accepted = rounds + figures.rounds, accepted + figures.accepted
        steps += figures.steps
    assert (rounds + accepted) / rounds >= least
    # a prompt each; otherwise the new text, and one word again
    assert sum(count > BACK + 12 for count in read) <= 2
    # a step is taken when a drafter has nothing to propose
    assert rounds <= len(read) <= rounds + steps


def test_undo_and_another_text_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, drafting = _sessions(demo("demo-bytes"), model("base"))
    _watched(drafting, monkeypatch)
    for session in (plain, drafting):
        session.chat("the state of", temperature=0, max_tokens=12).finish()
        session.chat("a robot walks", temperature=0, max_tokens=12).finish()
        session.undo()
        session.chat("the whole of the past", temperature=0, max_tokens=12).finish()
        session.regenerate(temperature=0, max_tokens=7).finish()
        session.reset()
        session.chat("and then", temperature=0, max_tokens=7).finish()
    check_same(plain, drafting)


def test_sampled_tokens_have_the_targets_distribution() -> None:
    sessions = _sessions(model("chat"), model("base"), 2)
    third_tokens_are_alike(sessions, "the state", 300, temperature=0.8, top_k=4)


def test_bytes_that_are_no_text_end_drafting_and_not_the_answer() -> None:
    plain, drafting = _sessions(model("bytes"), model("base"))
    prompt = [*b"the ", 0xFF, 0xC3, *b" state"]
    results = [s.generate(prompt, temperature=0, max_tokens=9).finish() for s in (plain, drafting)]
    assert results[0].tokens == results[1].tokens
    figures = results[1].speculation
    assert figures is not None and "not UTF-8" in figures.problem


def test_a_full_drafter_is_silent() -> None:
    """The hybrid has 64 positions, which the text of 300 bytes exceeds."""
    plain, drafting = _sessions(model("bytes"), model("hybrid"))
    prompt = "a robot walks and then it stops " * 9
    results = [s.generate(prompt, temperature=0, max_tokens=6).finish() for s in (plain, drafting)]
    assert results[0].tokens == results[1].tokens
    figures = results[1].speculation
    assert figures is not None and figures.problem == "" and figures.rounds == 0


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    source = save_mamba(tmp_path / "lossy", vocab_size=400)
    (source / "tokenizer.json").write_bytes(byte_level(ignore_merges=True))
    (source / "generation_config.json").unlink()
    export_checkpoint(source, tmp_path / "bundle", verify=False)
    lossy = edge.load(tmp_path / "bundle", threads=1)
    for target, drafter in ((model("bytes"), lossy), (lossy, model("bytes"))):
        with pytest.raises(InputError, match="bundle cannot encode all text") as refused:
            target.session(draft=drafter)
        assert refused.value.field == "draft" and refused.value.remedy
