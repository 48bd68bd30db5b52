"""The bench of drafting: one prompt of each set, and a tiny simulation. No time is asserted."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import edge
from edge.apps.bench import drafts, simulated
from edge.apps.bench.drafts import DraftRow, app
from edge.apps.measure.table import show
from edge.apps.profile.draft_costs import leviathan_speedup
from edge.errors import EdgeError
from edge.runtime.speculate.shape import Shape
from tests.session_models import bundle

WAYS = ["none", "chain", "tree", "bandit", "n-gram"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two of the five sets."""
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


def test_table_of_one_prompt(data: Path) -> None:
    options = ["--data", str(data), "--prompts", "1", "--rounds", "1", "--tokens", "5",
               "--temperatures", "0", "--threads", "1", "--simulate", "tiny", "--json"]  # fmt: skip
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    rows = {(row["prompts"], row["way"]): row for row in found["rows"]}
    sets = ("GSM8K", "WikiText", "repeats", "public")
    assert list(rows) == [(name, way) for name in sets for way in WAYS]
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    assert all(row["count"] == (2 if name == "public" else 1) for (name, _), row in rows.items())
    for way in WAYS[1:]:
        # of two prompts, one of each set, 0.1 of the way from the slower to the quicker one
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
    shown = [(row["recipe"], row["depth"]) for row in found["simulated"]]
    assert shown == [("fp32", 2), ("fp32", 4), ("w8a8", 2), ("w8a8", 4)]
    # a run of several tokens has the bits of steps in both
    assert all(row["same"] == row["tokens"] for row in found["simulated"])


def test_shown_in_80_columns() -> None:
    rows = [
        DraftRow("HumanEval", 10, 1.0, "none", 1234.5),
        DraftRow("HumanEval", 10, 1.0, "bandit", 1234.5, 3.25, 1.5, 1.4, 1.25, 1.75, 0.05),
    ]
    chain = simulated.Simulated("w8a8", 4, 0.7, 2.8, 0.71, 1.4, 1.9, 2.0, 1.98, 96, 96)
    facts = {
        "target": "demo", "draft": "demo-draft", "threads": 2, "rounds": 3, "tokens": 48,
        "machine": {"cpu": "x"}, "used_by_others": 0.0, "trustworthy": True,
        "rows": [asdict(row) for row in rows], "absent": {"MT-bench": "is not here"},
        "simulated": [chain.to_dict()], "simulated_shape": "130m",
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    show(drafts.parts(facts), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1.50 | 1.40 | 1.25 | 1.75 |  5%" in text and "95%" in text
    assert "but the slowest tenth" in text and "| w8a8   | 4 |" in text and "|   96 |" in text
    assert "MT-bench: is not here" in text and "…" not in text


def test_replay_is_right_as_often_as_it_is_told() -> None:
    answer = list(range(1000))
    for acceptance, low, high in ((0.0, 0, 0), (0.7, 0.6, 0.8), (1.0, 1, 1)):
        drafter = simulated.Replay(3, answer, acceptance, 2000)
        right = total = 0
        for said in range(0, 900, 3):
            tokens = [0] * (3 + said)
            draft = drafter.propose(tokens, answer[said], Shape.of_chain(3), None, [])  # type: ignore[arg-type]
            assert len(draft.tokens) == 3
            right += sum(a == b for a, b in zip(draft.tokens, answer[said + 1 :], strict=False))
            total += 3
        assert low <= right / total <= high


def test_simulation_says_what_the_target_says() -> None:
    engine = edge.load(bundle("base"), threads=1).engine
    (always,) = simulated.simulate_drafts(engine, [3], acceptance=1.0, tokens=17, rounds=1)
    assert always.same == always.tokens == 17
    assert always.acceptance_length == 4 and always.found == pytest.approx(1)
    assert always.expected == pytest.approx(leviathan_speedup(1.0, 3, 0.0, always.verify), rel=1e-6)
    (never,) = simulated.simulate_drafts(engine, [3], acceptance=0.0, tokens=9, rounds=1)
    assert never.same == 9 and never.acceptance_length == 1
    assert never.expected == pytest.approx(1 / never.verify)


def test_refused() -> None:
    for options, field in (
        (["--temperatures", "warm"], "--temperatures"),
        (["--tree", "a"], "--draft-tree"),
        (["--simulate", "vast"], "shape"),
        (["--recipe", "w9"], "--recipe"),
    ):
        done = CliRunner().invoke(app, options)
        assert isinstance(done.exception, EdgeError) and done.exception.field == field
