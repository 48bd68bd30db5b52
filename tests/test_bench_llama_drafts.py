"""Look-ups here beside llama.cpp's. No time is asserted, and most of it needs no llama.cpp."""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import edge
from edge.apps.bench import llama_drafts, peers
from edge.apps.bench.llama_drafts import (
    BANDIT,
    EDGE,
    LLAMA,
    PLAIN,
    CountedLookUp,
    DraftedAnswer,
    EdgeWriter,
    app,
    encoded,
    rows_of,
    verified,
)
from edge.apps.measure.table import show
from edge.errors import InputError
from edge.export.exporter import export_checkpoint
from tests.gguf_files import write_gguf
from tests.tiny_teachers import taught

PROMPT = "Say this three times: the cat sat on the mat, and the cat sat on the hat."
LOOK_UP = "look-up of 2"


@pytest.mark.parametrize(
    "drafts, end, expected",
    [
        ([], 9, (0, 0)),
        ([(11, 2), (14, 2), (15, 0), (16, 3)], 18, (3, 3 + 1 + 2)),
        ([(11, 0), (12, 0)], 13, (0, 0)),
    ],
)
def test_tokens_of_runs_that_verified_a_draft(
    drafts: list[tuple[int, int]], end: int, expected: tuple[int, int]
) -> None:
    assert verified(drafts, end) == expected


def test_drafts_are_noted_as_they_are_made() -> None:
    look_up = CountedLookUp(lambda ids, **_: ids[1:3] if ids[-1] == 5 else ids[:0])
    assert [look_up([3, 4, 5]), look_up([3, 4, 6, 7])] == [[4, 5], []]
    assert look_up.drafts == [(3, 2), (4, 0)]


def test_our_look_ups_write_the_plain_answer() -> None:
    model = edge.load("demo", threads=1)
    ids = encoded(model, PROMPT)
    plain = EdgeWriter(model, PLAIN).write(ids, 32)
    assert plain.rounds == plain.drafted_tokens == 0 and len(plain.tokens) > 1
    fixed = EdgeWriter(model, LOOK_UP, 2)
    drafted = fixed.write(ids, 32)
    assert drafted.tokens == plain.tokens and drafted.seconds > 0
    assert 1 <= drafted.drafted_tokens / drafted.rounds <= 3
    again = fixed.write(ids, 32)  # from an empty session
    assert (again.tokens, again.rounds) == (drafted.tokens, drafted.rounds)
    assert EdgeWriter(model, BANDIT).write(ids, 32).tokens == plain.tokens


def test_rows_compare_a_program_with_itself() -> None:
    """By hand: two prompts of two sets, of which one loops, and an answer of one token."""
    way, other = (LLAMA, PLAIN), (LLAMA, LOOK_UP)
    loops = tuple([1, 2] * 10)
    results = {
        "A": {
            way: [[DraftedAnswer((1, 2, 3), 2.0), DraftedAnswer((9,), 0.0)]],
            other: [[DraftedAnswer((1, 2, 3), 1.0, 1, 2), DraftedAnswer((9,), 0.0)]],
        },
        "B": {
            way: [[DraftedAnswer(loops, 19.0)]],
            other: [[DraftedAnswer(loops[:-1], 6.0, 5, 18)]],
        },
    }
    rows = {(row.prompts, row.way): row for row in rows_of(results)}
    assert {name for name, _ in rows} == {"A", "B", "public", "no loops", "loops"}
    assert rows["A", PLAIN].count == 1 and rows["A", PLAIN].tokens_per_s == 1
    assert rows["A", PLAIN].speedup is rows["A", PLAIN].same is None
    a, b, both = (rows[name, LOOK_UP] for name in ("A", "B", "public"))
    assert (a.speedup, a.acceptance_length, a.same) == (2, 2, 1)
    assert (b.speedup, b.acceptance_length, b.same) == (3, 3.6, 0)
    assert (both.count, both.same) == (2, 1)
    assert both.speedup == pytest.approx((20 / 7) / (21 / 21))
    assert both.acceptance_length == pytest.approx(20 / 6)
    assert both.median_prompt == 2.5 and both.slowest_tenth == pytest.approx(2.1)
    assert asdict(rows["no loops", LOOK_UP]) == asdict(a) | {"prompts": "no loops"}
    assert asdict(rows["loops", LOOK_UP]) == asdict(b) | {"prompts": "loops"}


def test_the_table() -> None:
    row = llama_drafts.LlamaRow("HumanEval", 20, LLAMA, "look-up of 10", 123.4, 3.25, 1.5, 1.4, 0.9,
                                19)  # fmt: skip
    facts = {
        "target": "demo", "gguf": "demo.gguf", "threads": 1, "rounds": 1, "tokens": 48,
        "machine": {"cpu": "x"}, "used_by_others": 0.5, "trustworthy": False,
        "versions": {"llama-cpp-python": "1.2"}, "rows": [asdict(row)],
        "absent": {"MT-bench": "is not here"},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    show(llama_drafts.parts(facts), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (
        "| 20 HumanEval | llama.cpp | look-up of 10 |   3.25 | 123 | 1.50 | 1.40 | 0.90 |" in text
    )
    assert "19 of 20" in text and "do not trust" in text and "MT-bench: is not here" in text


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = str(tmp_path / "absent.gguf")
    monkeypatch.setattr(llama_drafts, "installed", lambda name: None)
    done = CliRunner().invoke(app, ["demo", absent])
    assert isinstance(done.exception, InputError) and peers.INSTALL_LLAMA in str(done.exception)
    monkeypatch.setattr(llama_drafts, "installed", lambda name: "1.2")
    done = CliRunner().invoke(app, ["demo", absent])
    assert isinstance(done.exception, InputError) and "is not a file" in str(done.exception)


@pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason=peers.INSTALL_LLAMA)
def test_beside_llama_cpp(tmp_path: Path) -> None:
    """Both read the same weights in fp32, so their answers are the same, drafted or not."""
    _, teacher = taught()
    export_checkpoint(teacher, tmp_path / "bundle", quant="fp32")
    file = write_gguf(teacher, tmp_path / "tiny.gguf")
    options = ["--prompts", "2", "--tokens", "24", "--look-ups", "2", "--threads", "1", "--json"]
    done = CliRunner().invoke(app, [str(tmp_path / "bundle"), str(file), *options])
    assert done.exit_code == 0, done.output
    rows = {
        (row["program"], row["way"]): row
        for row in json.loads(done.stdout)["rows"]
        if row["prompts"] == "repeats"
    }
    assert [*rows] == [(EDGE, PLAIN), (EDGE, LOOK_UP), (EDGE, BANDIT), (LLAMA, PLAIN),
                       (LLAMA, LOOK_UP)]  # fmt: skip
    assert {row["same"] for row in rows.values()} == {None, 2}
    assert 1 <= rows[LLAMA, LOOK_UP]["acceptance_length"] <= 3
    wrong = CliRunner().invoke(app, ["demo", str(file), *options])
    assert isinstance(wrong.exception, InputError) and "not the bundle's" in str(wrong.exception)
