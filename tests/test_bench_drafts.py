"""The bench of drafting: one prompt of each set. No time is asserted."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import edge
from edge.apps.bench import drafts, faithful
from edge.apps.bench.drafts import DraftRow, app
from edge.apps.measure.table import show
from edge.apps.profile.drafts import DraftRun, DraftSide, repeated_share
from edge.errors import EdgeError
from tests.facts import says

WAYS = ["none", "chain", "tree", "ucb", "bandit", "n-gram"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return two of the five sets."""
    rows = [{"question": f"How many are {n} and {n}?", "answer": "x"} for n in range(6)]
    (tmp_path / "gsm8k.test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    article = " ".join(f"word{n}" for n in range(120))
    (tmp_path / "wikitext2.test.txt").write_text(f" = Title = \n\n {article} \n short one\n")
    return tmp_path


def test_sets_of_prompts_and_reasons_for_the_absent(data: Path) -> None:
    sets, absent = drafts.prompt_sets(data, 3)
    assert sets.keys() == {"GSM8K", "WikiText", "repeats"}
    assert sets["GSM8K"] == tuple(f"How many are {n} and {n}?" for n in (0, 2, 4))
    (continued,) = sets["WikiText"]
    assert continued.split() == [f"word{n}" for n in range(48)]
    assert absent.keys() == {"MT-bench", "Vicuna", "HumanEval"}
    assert all("cannot be read" in reason for reason in absent.values())
    sets, absent = drafts.prompt_sets(None, 1)
    assert sets.keys() == {"repeats"} and len(absent) == 5
    assert "EDGE_EVAL_DATA" in absent["MT-bench"]


def test_prompts_that_do_not_fit_are_left_out(data: Path) -> None:
    """They ended the whole benchmark."""
    fits = drafts.fitting(edge.load("demo", threads=1))
    capacity = edge.load("demo", threads=1).session().capacity
    assert capacity is not None and fits("Hello.") and not fits("robot " * capacity)
    sets, absent = drafts.prompt_sets(data, 9, lambda prompt: "4" not in prompt)
    assert sets["GSM8K"] == tuple(f"How many are {n} and {n}?" for n in (0, 1, 2, 3, 5))
    assert says(absent["WikiText"], "no prompt", "context")


def test_table_of_one_prompt(data: Path) -> None:
    options = ["--data", str(data), "--prompts", "1", "--rounds", "1", "--tokens", "5",
               "--temperatures", "0", "--threads", "1", "--json"]  # fmt: skip
    some = CliRunner().invoke(app, [*options, "--prompts", "1", "--ways", "n-gram"])
    assert {row["way"] for row in json.loads(some.stdout)["rows"]} == {"none", "n-gram"}
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    rows = {(row["prompts"], row["way"]): row for row in found["rows"]}
    sets = ("GSM8K", "WikiText", "repeats", "public", "no loops")
    assert list(rows) == [(name, way) for name in sets for way in WAYS]
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    assert all(
        row["count"] == (2 if name in ("public", "no loops") else 1)
        for (name, _), row in rows.items()
    )
    for way in WAYS[1:]:
        # of two prompts, one of each set, 0.1 of the way from the slower to the faster one
        low, high = sorted(rows[name, way]["speedup"] for name in ("GSM8K", "WikiText"))
        both = rows["public", way]
        assert both["slowest_tenth"] == pytest.approx(low + 0.1 * (high - low))
        assert both["median_prompt"] == pytest.approx((low + high) / 2)
    for name in ("GSM8K", "WikiText", "repeats"):
        assert rows[name, "none"]["speedup"] is None
        for way in ("chain", "tree"):
            row = rows[name, way]
            assert row["acceptance_length"] >= 1 and row["speedup"] > 0
            assert row["theoretical"] > 0 and row["slowest_tenth"] == pytest.approx(row["speedup"])
    assert found["absent"].keys() == {"MT-bench", "Vicuna", "HumanEval"}


def test_answers_that_loop_are_apart() -> None:
    """A run of four that occurred before counts as looping; also, which prompts belong to which
    set.
    """
    assert repeated_share(range(9)) == repeated_share([1, 2]) == 0
    assert repeated_share([1, 2] * 20) == pytest.approx(35 / 37)
    runs = [DraftRun(9, 1.0, 1.0, 0.0, 0.0, None, share) for share in (0.1, 0.9, 0.5)]
    sides = {"none": DraftSide([runs, runs[::-1]]), "chain": DraftSide([runs])}
    for looping, places in ((False, [0, 2]), (True, [1])):
        some = drafts.those(sides, looping)
        assert some is not None and some["chain"].rounds == [[runs[at] for at in places]]
        assert len(some["none"].rounds) == 2
    assert drafts.those({"none": DraftSide([runs[:1]])}, True) is None


def test_shown_in_80_columns() -> None:
    rows = [
        DraftRow("HumanEval", 10, 1.0, "none", 1234.5),
        DraftRow("HumanEval", 10, 1.0, "bandit", 1234.5, 3.25, 1.5, 1.4, 1.25, 1.75, 0.05),
    ]
    facts = {
        "target": "demo", "draft": "demo-draft", "threads": 2, "rounds": 3, "tokens": 48,
        "machine": {"cpu": "x"}, "used_by_others": 0.0, "trustworthy": True,
        "rows": [asdict(row) for row in rows], "absent": {"MT-bench": "is not here"},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    show(drafts.parts(facts), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1.50 | 1.40 | 1.25 | 1.75 |  5%" in text
    assert "but the slowest tenth" in text
    assert "MT-bench: is not here" in text and "…" not in text


def test_refused() -> None:
    for options, field in (
        (["--temperatures", "warm"], "--temperatures"),
        (["--tree", "a"], "--draft-tree"),
        (["--ways", "chain,luck"], "--ways"),
    ):
        done = CliRunner().invoke(app, options)
        assert isinstance(done.exception, EdgeError) and done.exception.field == field


def test_faithfulness_of_bytes_by_rank() -> None:
    """The first rank is the byte model's own answer. ln p is that of single steps."""
    options = ["--prompts", "1", "--bytes", "40", "--betas", "1,3", "--json"]
    done = CliRunner().invoke(faithful.app, options)
    assert done.exit_code == 0, done.output
    plain, first, third, words = json.loads(done.stdout)["rows"]
    assert plain["log_odds"] == first["log_odds"] == first["same"] == 1
    assert first["per_run"] > 1 and third["same"] == 0
    assert plain["per_run"] is None and words["per_run"] is None

    model, other = (edge.load(name, threads=1) for name in ("demo-bytes", "demo-draft"))
    (prompt, *_) = faithful.DEFAULT
    known = {
        faithful.PLAIN: faithful.write(model.session(), prompt, 40),
        faithful.ALONE: faithful.write(other.session(), prompt, 40),
    }
    sums = []
    for one in known.values():
        assert len(one.data) == 40
        state = model.engine.new_state(window=1, capacity=None)
        total = 0.0
        text = prompt.encode() + one.data
        for at, (byte, following) in enumerate(itertools.pairwise(text)):
            logits = model.engine.run(np.array([[byte]]), state, rows="last", commit=True)[0, -1]
            p = np.exp(logits - logits.max(), dtype=np.float64)
            total -= np.log(p[following] / p.sum()) if at + 1 >= len(prompt.encode()) else 0
        sums.append(total)
    (row,) = [row for row in faithful.compare(model, [prompt], {w: [o] for w, o in known.items()})
              if row.way == faithful.ALONE]  # fmt: skip
    assert row.log_odds == pytest.approx(sums[0] / sums[1], rel=1e-3)
    assert words["log_odds"] == pytest.approx(row.log_odds)
    assert sums[0] < sums[1]
