"""Perplexity and bits per byte: against plain computations, for every form of text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import edge
from edge.apps.evaluate import texts
from edge.apps.evaluate.parts import Encoder, Part, first_wanted
from edge.apps.evaluate.score import RunReader, Tally, measure, nats
from edge.apps.evaluate.texts import Dialogue, Stretch, read_texts
from edge.apps.evaluate.windows import TextRun, TextSource, Windows, plan, reading
from edge.errors import InputError
from edge.export.graph.run import GraphRunner, open_reference
from edge.runtime.model import EMBEDDED, Model
from edge.text.spm import SentencePieceTokenizer
from edge.text.template import Message
from tests.session_models import model as tiny
from tests.text_samples import spm_model

ROOT = Path(__file__).parents[1]
PROSE = ROOT / "docs/inside/decisions.md"


def reference_nats(model: Model, ids: Sequence[int]) -> torch.Tensor:
    """Return -ln p of every id but the first, by torch reference ops from an empty state."""
    runner = GraphRunner(open_reference(model.path), model.config)
    logits, _ = runner.run(np.array([ids]), runner.initial(1, len(ids)))
    log_p = F.log_softmax(torch.from_numpy(logits[0]).double(), -1)
    return F.nll_loss(log_p[:-1], torch.tensor(ids[1:]), reduction="none")


def head_of(path: Path, characters: int, folder: Path) -> Path:
    out = folder / "text.txt"
    out.write_text(path.read_text("utf-8")[:characters], "utf-8")
    return out


def found(model: Model, path: Path, how: Windows | None) -> Tally:
    return measure(RunReader(model.engine, how), TextSource([path], how).runs(model))


def test_windows_are_those_of_the_usual_recipe(tmp_path: Path) -> None:
    """The loop of https://huggingface.co/docs/transformers/perplexity on the demo bundle."""
    demo = edge.load("demo-fp16", threads=1)
    path = head_of(PROSE, 700, tmp_path)
    text = path.read_text("utf-8")
    ids = demo.tokenizer.encode(text)
    window, stride = 96, 40
    assert len(ids) > 2 * window
    losses, previous_end = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        target_length = end - previous_end
        losses.append(reference_nats(demo, ids[begin:end])[-target_length:])
        previous_end = end
        if end == len(ids):
            break
    expected = torch.cat(losses)
    tally = found(demo, path, Windows(window, stride))
    assert tally.tokens == len(expected) == len(ids) - 1
    assert tally.nats == pytest.approx(float(expected.sum()), rel=1e-4)
    assert tally.perplexity == pytest.approx(float(expected.mean().exp()), rel=1e-4)
    error = float(expected.std(correction=0)) / math.sqrt(len(expected)) * tally.perplexity
    assert tally.perplexity_error == pytest.approx(error, rel=1e-3)
    # the first token is not predicted, so its bytes are not counted
    size = len(text.encode()) - len(demo.tokenizer.decode(ids[:1]).encode())
    assert tally.bytes == size and tally.words == len(text.split())
    assert tally.bits_per_byte == pytest.approx(
        float(expected.sum()) / math.log(2) / size, rel=1e-4
    )


def test_a_stream_carries_the_state_through(tmp_path: Path) -> None:
    model = edge.load("demo-bytes", threads=1)
    path = head_of(PROSE, 400, tmp_path)  # more than three chunks
    ids = list(path.read_bytes())
    expected = float(reference_nats(model, ids).sum())
    tally = found(model, path, None)
    assert (tally.tokens, tally.bytes) == (len(ids) - 1, len(ids) - 1)
    assert tally.nats == pytest.approx(expected, rel=1e-4)
    assert tally.perplexity == tally.byte_perplexity == pytest.approx(2**tally.bits_per_byte)


def test_conversions_are_those_of_mambabyte() -> None:
    """Appendix E and Table 10: PG19's test split has 41,289,101 bytes and 6,965,511 words."""
    bytes_, words, subwords = 41_289_101, 6_965_511, 10_282_006
    nats_ = 0.5887 * bytes_
    by_bytes = Tally(nats=nats_, tokens=bytes_, bytes=bytes_, words=words)
    by_subwords = Tally(nats=nats_, tokens=subwords, bytes=bytes_, words=words)
    assert by_bytes.bits_per_byte == pytest.approx(0.5887 / math.log(2))
    expected = math.exp(bytes_ / words * math.log(2) * by_bytes.bits_per_byte)
    for tally in (by_bytes, by_subwords):
        assert tally.word_perplexity == pytest.approx(expected) == pytest.approx(32.8, abs=0.1)
        assert tally.bits_per_byte == by_bytes.bits_per_byte
    assert by_subwords.perplexity == pytest.approx(expected ** (words / subwords))
    silent = Tally(nats=1000, tokens=1).to_dict()
    assert silent["perplexity"] is None and silent["bits_per_byte"] is None


def part(ids: Sequence[int], wanted: Sequence[bool], first: bool) -> Part:
    """Return a part whose ids stand for 1 + id % 3 bytes each."""
    array, flags = np.array(ids, np.int64), np.array(wanted, np.bool_)
    sizes = 1 + array % 3
    return Part(array, flags, sizes, int(sizes[flags].sum()), int(flags.sum()), first)


DOCUMENT = st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=60)


@given(
    documents=st.lists(DOCUMENT, max_size=4),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    window=st.integers(2, 20),
    stride=st.integers(1, 20),
    stream=st.booleans(),
)
@settings(max_examples=300)
def test_every_id_is_predicted_once_however_the_text_is_cut(
    documents: list[list[tuple[int, bool]]], cuts: list[int], window: int, stride: int, stream: bool
) -> None:
    how = None if stream else Windows(window, min(stride, window))
    parts: list[Part] = []
    expected: list[int] = []  # the ids to predict, document after document
    size = 0
    for document in documents:
        start, turn = 0, 0
        while start < len(document):
            piece = document[start : start + cuts[turn % len(cuts)]]
            parts.append(part([i for i, _ in piece], [w for _, w in piece], start == 0))
            start, turn = start + len(piece), turn + 1
        for at, (token, wanted) in enumerate(document):
            lost = at == 0 or (how and how.stride == how.window and at % how.window == 0)
            if wanted and not lost:
                expected.append(token)
                size += 1 + token % 3
    got: list[int] = []
    runs = list(plan(parts, how))
    for run in runs:
        assert not run.wanted[0] and len(run.ids) == len(run.wanted)
        assert how is None or (len(run.ids) <= how.window and run.fresh)
        got += [int(token) for token in run.ids[run.wanted]]
    assert got == expected
    assert sum(run.bytes for run in runs) == size
    assert sum(run.first for run in runs) == sum(len(document) > 1 for document in documents)


def test_a_plan_holds_no_more_than_a_window_and_a_part() -> None:
    drawn = 0

    def parts() -> Iterator[Part]:
        nonlocal drawn
        for index in range(100):
            drawn += 1
            yield part([1] * 10, [True] * 10, index == 0)

    seen = 0
    for run in plan(parts(), Windows(16, 8)):
        seen += int(run.wanted.sum())
        assert drawn * 10 <= seen + 16 + 10
    assert seen == 999


def test_files_are_read_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = "a line\r\nwith é and 東京\n"
    path = tmp_path / "a.txt"
    path.write_bytes(f"{one}<|endoftext|>\r\n<|endoftext|>\nsecond <|endoftext|>\nend".encode())
    told: list[int] = []
    blocks = list(read_texts([path], told.append))
    assert blocks == [Stretch(one, True), Stretch("second <|endoftext|>\nend", True)]
    assert sum(told) == path.stat().st_size
    monkeypatch.setattr(texts, "MAX_STRETCH", 12)
    monkeypatch.setattr(texts, "MAX_LINE", 16)
    pieces = list(read_texts([path]))
    assert [p.first for p in pieces if isinstance(p, Stretch)].count(True) == 2 < len(pieces)
    assert "".join(p.text for p in pieces if isinstance(p, Stretch)) == (
        one + "second <|endoftext|>\nend"
    )


@pytest.mark.parametrize("name", EMBEDDED)
def test_text_cut_into_stretches_has_the_ids_of_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = edge.load(name, threads=1)
    encoder = Encoder(model.tokenizer, model.template)
    monkeypatch.setattr(texts, "MAX_STRETCH", 1000)
    parts = list(encoder.parts(read_texts([PROSE])))
    whole = encoder.text(PROSE.read_text("utf-8"), first=True)
    assert len(parts) > 5
    assert np.concatenate([p.ids for p in parts]).tolist() == whole.ids.tolist()
    assert sum(p.bytes for p in parts) == whole.bytes == PROSE.stat().st_size
    assert sum(p.words for p in parts) == whole.words
    assert int(whole.sizes.sum()) == whole.bytes


def test_a_tokenizer_that_puts_a_space_before_texts_adds_no_bytes() -> None:
    data = spm_model(add_dummy_prefix=True)
    tokenizer = SentencePieceTokenizer(data, bos=1, add_bos=True)
    encoder = Encoder(tokenizer, None)
    begun = encoder.text("the state", first=True)
    assert begun.ids[0] == 1 and begun.wanted.tolist() == [False] + [True] * (len(begun.ids) - 1)
    assert int(begun.sizes.sum()) == begun.bytes == 9
    later = encoder.text(" and more", first=False)
    assert int(later.sizes.sum()) == later.bytes == 9 and 1 not in later.ids
    assert not encoder.text("x", first=False, wanted=False).wanted.any()


def test_of_a_conversation_what_is_said_is_predicted(tmp_path: Path) -> None:
    messages = [("user", "hi <|end|> there"), ("assistant", "")]
    messages += [("user", "the state"), ("assistant", "ü")]
    path = tmp_path / "talk.jsonl"
    record = {"messages": [{"role": r, "content": c} for r, c in messages], "source": "x"}
    path.write_text(json.dumps(record) + "\n\n" + json.dumps({"text": "plain"}) + "\n")
    blocks = list(read_texts([path]))
    talk = Dialogue(tuple(Message(r, c) for r, c in messages))
    assert blocks == [talk, Stretch("plain", True)]
    for kind in ("chat", "bytes"):
        model = tiny(kind)
        assert model.template is not None
        made = next(Encoder(model.tokenizer, model.template).parts(blocks))
        whole = model.template.encode(talk.messages, add_generation_prompt=False)
        assert made.ids.tolist() == whole
        said = "".join(content for _, content in messages)
        ends = [6, 6, 6] if kind == "chat" else []  # of the messages that are not empty
        spoken = [int(token) for token in made.ids[made.wanted]]
        assert [t for t in spoken if t in model.tokenizer.eos] == ends
        assert model.tokenizer.decode([t for t in spoken if t not in ends]) == said
        assert made.bytes == len(said.encode())
        assert made.words == sum(len(content.split()) for _, content in messages)
    with pytest.raises(InputError, match="no chat template"):
        list(Encoder(tiny("base").tokenizer, None).parts(blocks))


def test_a_limit_counts_wanted_ids_and_what_they_say() -> None:
    model = tiny("bytes")
    encoder = Encoder(model.tokenizer, None)
    blocks = [Stretch("ab cd ", True), Stretch("ef gh", False), Stretch("ij", True)]
    for limit in range(2, 14):
        parts = list(first_wanted(encoder.parts(blocks), limit, model.tokenizer))
        assert sum(len(p.ids) for p in parts) == sum(p.bytes for p in parts) == min(limit, 13)
        text = "ab cd ef ghij"[:limit]
        assert sum(p.words for p in parts) == len(text[:11].split()) + (limit > 11)
    # ids that are only read do not count
    some = [part(range(8), [i % 2 == 1 for i in range(8)], True)]
    assert next(first_wanted(some, 2, model.tokenizer)).ids.tolist() == [0, 1, 2, 3, 4]


def test_logits_of_rows_that_nobody_wants_are_not_computed() -> None:
    """Windows and conversations give the same as reading everything, also at odd places."""
    model = tiny("bytes")  # chunks of 16
    ids = np.random.default_rng(0).integers(0, 256, 90)
    every = np.full(90, True)
    every[0] = False

    def read(wanted: np.ndarray) -> dict[int, float]:
        run = TextRun(ids, wanted, True, False, True, 0, 0)
        out: dict[int, float] = {}
        places = iter(np.flatnonzero(wanted))
        for came, logits in RunReader(model.engine, None).read(run):
            values = nats(logits, came)
            out |= {int(next(places)): float(value) for value in values}
        return out

    whole = read(every)
    assert sorted(whole) == list(range(1, 90))
    for seed in range(5):
        some = every & (np.random.default_rng(seed).random(90) < 0.2)
        assert read(some) == pytest.approx({int(i): whole[int(i)] for i in np.flatnonzero(some)})
    assert read(np.full(90, False)) == {}


def test_probabilities_are_those_of_every_row() -> None:
    generator = np.random.default_rng(3)
    logits = (generator.normal(size=(300, 5000)) * 9).astype(np.float32)
    ids = generator.integers(0, 5000, 300)
    expected = F.cross_entropy(
        torch.from_numpy(logits).double(), torch.from_numpy(ids), reduction="none"
    )
    np.testing.assert_allclose(nats(logits, ids), expected.numpy(), rtol=1e-5, atol=1e-5)


def test_windows_fit_the_models(tmp_path: Path) -> None:
    hybrid, free = tiny("hybrid"), tiny("chat")
    assert reading([free.config], None, None, False) == Windows(2048, 1024)
    assert reading([hybrid.config], None, None, False) == Windows(64, 32)
    assert reading([free.config, hybrid.config], None, 5, False) == Windows(64, 5)
    assert reading([free.config], 7, None, False) == Windows(7, 3)
    assert reading([free.config], None, None, True) is None
    for arguments in ((1, None, False), (8, 9, False), (8, 0, False), (8, None, True)):
        with pytest.raises(InputError):
            reading([free.config], *arguments)
    with pytest.raises(InputError, match="trained for 64"):
        RunReader(hybrid.engine, Windows(65, 5))
    with pytest.raises(InputError, match="attention"):
        RunReader(hybrid.engine, None)
