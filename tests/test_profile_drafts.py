"""`edge profile --draft`: the formula, the time breakdown, the refusals. Nothing asserts a time."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import edge
from edge.apps import prompts
from edge.apps.cli import app
from edge.apps.measure import page
from edge.apps.measure.stopwatch import timed
from edge.apps.profile import draft_costs, draft_report
from edge.apps.profile.draft_costs import Prices
from edge.apps.profile.drafts import Drafted, DraftRequest, DraftRun, DraftSide, compare
from edge.errors import EdgeError, InputError
from edge.runtime.model import Model
from edge.runtime.speculate.decode import Share, Speculation
from edge.runtime.speculate.shape import LOOK_UP, MODEL, DraftSource
from tests.session_models import bundle, model
from tests.test_profile_command import Outline

PROMPTS = ("one two three one two three", "three two one")


def test_formula_by_hand() -> None:
    # Leviathan et al., table 1: α 0.8 and γ 5 yield 3.69 tokens a round; at α 0.6 and γ 2, 1.96
    assert draft_costs.expected_tokens(0.8, 5) == pytest.approx(3.68928)
    assert draft_costs.expected_tokens(0.6, 2) == pytest.approx(1.96)
    assert draft_costs.expected_tokens(0.0, 4) == 1 and draft_costs.expected_tokens(1.0, 4) == 5
    # (1 - 0.7^5) / 0.3
    assert draft_costs.expected_tokens(0.7, 4) == pytest.approx(2.7731)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0])
def test_acceptance_rate_is_found_again(alpha: float) -> None:
    length = draft_costs.expected_tokens(alpha, 3)
    assert draft_costs.acceptance_rate(length, 3) == pytest.approx(alpha, abs=1e-6)


def test_expected_speedup_is_the_formula_of_one_chain_and_a_mean_of_several() -> None:
    chain, tree = (1, 1, 1), (2, 1)
    prices = {chain: Prices(0.6, 1.4), tree: Prices(0.5, 2.0)}
    # 10 rounds of chains with 27 tokens in total: 27 / (10 · 2)
    alone = draft_costs.expected_speedup(27, 0, {chain: 10}, prices)
    alpha = draft_costs.acceptance_rate(2.7, 3)
    assert alone == pytest.approx(1.35)
    # (1 - α^4) / ((1 - α) (3 · 0.2 + 1.4))
    assert alone == pytest.approx((1 - alpha**4) / ((1 - alpha) * (3 * 0.2 + 1.4)))
    # 20 tokens of chains, 8 of trees, 2 of steps: 30 / (5 · 2 + 4 · 2.5 + 2)
    both = draft_costs.expected_speedup(30, 2, {chain: 5, tree: 4}, prices)
    assert both == pytest.approx(30 / 22)
    assert draft_costs.expected_speedup(0, 0, {}, prices) is None


def test_tree_of_the_costs_is_that_of_its_shape() -> None:
    # the root, its two children, three of each of them
    parents = draft_costs.parent_rows(draft_costs.Shape((2, 3)))
    assert parents == (-1, 0, 0, 1, 1, 1, 2, 2, 2)


def _run(
    tokens: int, seconds: float, speculation: Speculation | None = None, **of: float
) -> DraftRun:
    return DraftRun(tokens, seconds, of.get("target", 0.0), of.get("drafter", 0.0),
               of.get("reading", 0.0), speculation)  # fmt: skip


def _drafted(rounds: list[list[DraftRun]], plain: list[list[DraftRun]]) -> Drafted:
    chain = (1, 1)
    costs = draft_costs.DraftCosts(0.01, 0.002, {chain: Prices(0.4, 1.2)}, {chain: 0.05})
    request = DraftRequest("small", 2, None, PROMPTS, "of a test")
    return Drafted(request, DraftSide(plain), DraftSide(rounds), costs, True)


def test_figures_by_hand() -> None:
    def sums() -> Speculation:
        return Speculation("small", rounds=4, drafted=8, accepted=6, steps=1, draft_s=0.02,
                           verify_s=0.05, shapes={(1, 1): 4},
                           sources={MODEL: Share(4, 8, 6, {(1, 1): 4})})  # fmt: skip

    # two prompts: one twice as fast with drafts, one as fast as without
    drafted = [[_run(11, 0.1, sums(), target=0.05, drafter=0.02, reading=0.004),
                _run(11, 0.2, sums(), target=0.1, drafter=0.04, reading=0.004)]]  # fmt: skip
    plain = [[_run(10, 0.2, target=0.19), _run(10, 0.2, target=0.19)]]
    found = draft_report.to_dict(_drafted(drafted, plain), {})
    assert found["speedup"] == pytest.approx((22 / 0.3) / (20 / 0.4))
    assert found["slowest_tenth_speedup"] == pytest.approx(1.1 + 0.1 * 1.1)
    assert found["acceptance_length"] == pytest.approx(2.5)
    assert found["acceptance_rate"] == pytest.approx(draft_costs.acceptance_rate(2.5, 2), abs=1e-6)
    # 12 accepted, 8 of the target's own, 2 steps; 8 rounds of 1.6 steps and 2 of 1
    assert found["theoretical_speedup"] == pytest.approx(22 / (8 * 1.6 + 2))
    assert found["draft_ms"] == pytest.approx((40 - 8) / 8)
    assert found["verify_ms"] == pytest.approx(100 / 8)
    assert found["overhead_ms"] == pytest.approx((300 - 150 - 60) / 10)
    assert found["overhead_share"] == pytest.approx(0.3)
    assert found["plain_overhead_share"] == pytest.approx(0.05)
    assert found["reading_ms"] == pytest.approx(4)
    assert found["rewind_share"] == pytest.approx(0.05)


def test_look_ups_beside_a_model_cost_nothing_to_draft() -> None:
    def sums() -> Speculation:
        sources: dict[DraftSource, Share] = {MODEL: Share(3, 6, 3, {(1, 1): 3}),
                                             LOOK_UP: Share(5, 10, 9, {(1, 1): 5})}  # fmt: skip
        return Speculation("small and ngram", rounds=8, drafted=16, accepted=12, steps=2,
                           shapes={(1, 1): 8}, sources=sources)  # fmt: skip

    found = draft_report.to_dict(_drafted([[_run(22, 0.2, sums())]], [[_run(22, 0.4)]]), {})
    # 12 accepted, 8 of the target's own, 2 steps; 3 rounds of 1.6 steps, 5 of 1.2 and 2 of 1
    assert found["theoretical_speedup"] == pytest.approx(22 / (3 * 1.6 + 5 * 1.2 + 2))
    assert found["sources"]["look-up"]["acceptance_length"] == pytest.approx(1 + 9 / 5)
    assert found["sources"]["model"]["acceptance_length"] == pytest.approx(2)
    rows = [(row["source"], row["rounds"], row["draft_steps"]) for row in found["shapes"]]
    assert rows == [("look-up", 5, 0.0), ("model", 3, 0.4)]
    assert any("shapes look-up of 2 5×, 2 3×" in line for line in draft_report.lines(found))
    table = draft_report.shapes(found)
    assert [row[0] for row in table.rows] == ["look-up of 2", "chain of 2"]


def test_page_of_drafts_that_were_given_up_or_lose() -> None:
    sums = Speculation("small", steps=4, problem="<NaN>", accept="top-3")
    found = draft_report.to_dict(_drafted([[_run(4, 0.1, sums)]], [[_run(4, 0.2)]]), {})
    found |= {"lossy": True, "accept": "top-3"}
    said = [*draft_report.lines(found)]
    assert "small was given up: <NaN>" in " ".join(said) and "accepted by top-3" in " ".join(said)
    assert len([*draft_report.drawings(found)]) == 1
    cards = draft_report.cards(found)
    assert cards[1]["acceptance length"] == "absent"
    html = page.render("x", "x", [], [], [cards], [], said)
    assert "&lt;NaN&gt;" in html and "<NaN>" not in html


def test_no_prompt_with_a_second_token_has_no_slowest_tenth() -> None:
    # of each prompt one round yields a single token, each time another one
    one, more = _run(0, 0.0), _run(4, 0.2)
    absent: dict[str, str] = {}
    found = draft_report.to_dict(_drafted([[one, more], [more, one]], [[more, more]] * 2), absent)
    assert (
        found["slowest_tenth_speedup"] is None and "second token" in absent["slowest_tenth_speedup"]
    )
    assert "nine of ten" not in next(draft_report.lines(found))


def test_rounds_without_any_draft_say_nothing_of_its_cost() -> None:
    drew = Speculation("small", rounds=2, drafted=4, accepted=2, draft_s=0.02, verify_s=0.03,
                       shapes={(1, 1): 2},
                       sources={MODEL: Share(2, 4, 2, {(1, 1): 2})})  # fmt: skip
    left = Speculation("small", steps=4)
    drafted = [[_run(4, 0.1, drew)], *([_run(4, 0.1, left)] for _ in range(4))]
    found = draft_report.to_dict(_drafted(drafted, [[_run(4, 0.2)]] * 5), {})
    assert found["draft_ms"] == pytest.approx(10) and found["verify_ms"] == pytest.approx(15)
    assert found["plain_steps"] == 16 and found["rounds"] == 2
    absent: dict[str, str] = {}
    found = draft_report.to_dict(_drafted(drafted[1:], [[_run(4, 0.2)]] * 4), absent)
    assert found["draft_ms"] is None and "drafted nothing in 16" in absent["acceptance_length"]
    assert found["theoretical_speedup"] == 1 and len(list(draft_report.lines(found))) == 1


def test_timed_engine_runs_the_same_and_keeps_count() -> None:
    model = edge.load(bundle("base"), engine="ort", threads=1)
    copy, engine = timed(model)
    plain, watched = model.session(seed=0), copy.session(seed=0)
    wanted = plain.generate("one two", temperature=0, max_tokens=5).finish()
    assert watched.generate("one two", temperature=0, max_tokens=5).finish().tokens == wanted.tokens
    assert len(engine.runs) == math.ceil(wanted.prompt_tokens / engine.chunk) + 4
    assert engine.runs[0].reading and not any(run.reading for run in engine.runs[1:])
    assert all(run.seconds > 0 for run in engine.runs)
    assert not engine.finds_argmax
    with pytest.raises(EdgeError):
        engine.run_greedy(np.zeros((1, 1), np.int64), engine.new_state())


def _measured(kind: str, draft: Model | None, **shape: Any) -> dict[str, Any]:
    request = DraftRequest("x", shape.get("tokens"), shape.get("tree"), PROMPTS, "of a test")
    sampling = {"temperature": 0, "max_tokens": 9, "seed": 0}
    measure = compare(model(kind), draft or "ngram", request, sampling)
    return json.loads(json.dumps(draft_report.to_dict(measure(2, 1, lambda text: None), {})))


def test_reading_of_a_prompt_that_fits_the_drafters_window_is_no_drafting() -> None:
    # 64 drafted tokens: a window that takes the prompt like any other run
    found = _measured("base", edge.load(bundle("base"), threads=1), tokens=64)
    assert found["reading_ms"] > 0


@pytest.mark.parametrize("kind", ["base", "hybrid"])
def test_a_model_that_drafts_for_itself(kind: str) -> None:
    twin = edge.load(bundle(kind), threads=1)
    found = _measured(kind, twin, tokens=3)
    assert found["acceptance_length"] > 2 and found["accepted_tokens"] <= found["drafted_tokens"]
    assert found["shapes"][0]["branches"] == [1, 1, 1]
    assert 0 < found["acceptance_rate"] <= 1
    for name in ("speedup", "theoretical_speedup", "draft_ms", "verify_ms", "overhead_ms",
                 "step_ms", "draft_step_ms", "reading_ms"):  # fmt: skip
        assert found[name] > 0, name
    assert 0 < found["overhead_share"] < 1
    assert all(line for line in draft_report.lines(found))


def test_a_tree_has_no_acceptance_rate_but_is_expected_to_gain() -> None:
    found = _measured("base", edge.load(bundle("base"), threads=1), tree=(2, 1))
    assert found["acceptance_rate"] is None and found["theoretical_speedup"] > 0
    assert found["draft_tree"] == [2, 1] and not found["draft_auto"]


def test_through_text_no_formula_applies() -> None:
    absent: dict[str, str] = {}
    request = DraftRequest("x", 4, None, PROMPTS, "of a test")
    sampling = {"temperature": 0, "max_tokens": 6}
    measure = compare(edge.load("demo-bytes"), edge.load("demo-draft"), request, sampling)
    found = draft_report.to_dict(measure(1, 0, lambda text: None), absent)
    assert found["theoretical_speedup"] is None and "text" in absent["theoretical_speedup"]


def test_profile_demo_end_to_end(tmp_path: Path) -> None:
    written = tmp_path / "page.html"
    done = CliRunner().invoke(
        app,
        ["profile", "demo", "--draft", "demo-draft", "--draft-tokens", "2", "-p", "8", "-n", "6",
         "-r", "1", "--warmup", "0", "--context", "0", "--no-breakdown", "--json",
         "--html", str(written)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["speculation"]
    assert found["acceptance_length"] >= 1 and found["speedup"] > 0
    assert found["draft"] == "demo-draft" and found["prompts"] == len(prompts.DEFAULT)
    assert found["speedup_interval"] is None  # of one round
    assert found["accept"] == "exact" and found["lossy"] is False
    outline = Outline()
    outline.feed(text := written.read_text())
    assert outline.open == [] and outline.foreign == []
    assert "Drafting by demo-draft, against none" in outline.titles
    assert f"<b>{found['speedup']:.2f}</b>" in text and "<td>chain of 2</td>" in text
    assert "verifying and choosing" in text and f"{found['draft_ms']:.3f} ms" in text


def test_a_rule_that_loses_is_measured_and_named() -> None:
    request = DraftRequest("x", 3, None, PROMPTS, "of a test", "top-3")
    sampling = {"temperature": 0, "max_tokens": 9, "seed": 0}
    twin = edge.load(bundle("base"), threads=1)
    measured = compare(model("base"), twin, request, sampling)(1, 0, lambda text: None)
    found = draft_report.to_dict(measured, {})
    assert found["accept"] == measured.speculation.accept == "top-3" and found["lossy"] is True
    assert any("lossy" in line and "top-3" in line for line in draft_report.lines(found))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--accept", "top-3"], "--accept"),
        (["--draft", "ngram", "--accept", "top"], "--accept"),
        (["--draft-tokens", "2"], "--draft-tokens"),
        (["--draft-auto"], "--draft-auto"),
        (["--draft-prompts", "x"], "--draft-prompts"),
        (["--draft", "none", "--draft-tree", "2"], "--draft-tree"),
        (["--draft", "ngram", "--draft-tokens", "2", "--draft-tree", "2"], "--draft-tokens"),
        (["--draft", "ngram", "--draft-tree", "2;1"], "--draft-tree"),
        (["--draft", "ngram", "--draft-tree", "2,1"], "--draft-tree"),
        (["--draft", "ngram", "--draft-tokens", "0"], "--draft-tokens"),
        (["--draft", "ngram", "--against", "demo-fp16"], "--draft"),
        (["--draft", "ngram", "--jsonl"], "--draft"),
    ],
)
def test_refused(options: list[str], field: str) -> None:
    done = CliRunner().invoke(app, ["profile", "demo", "-p", "4", "-n", "2", *options])
    assert isinstance(done.exception, InputError)
    assert done.exception.field == field


def test_prompts_of_a_text_and_of_json_lines(tmp_path: Path) -> None:
    text = tmp_path / "some.txt"
    text.write_text("first\n\n second \n")
    assert prompts.read_prompts(text) == ("first", "second")
    rows = [{"turns": ["a", "b"]}, {"question": "c", "answer": "d"}, {"prompt": "e"}, {"text": "f"}]
    packed = tmp_path / "some.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert prompts.read_prompts(packed) == ("a", "c", "e", "f")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", b"\n"),
        ("a.txt", b"\xff"),
        ("a.jsonl", b"{"),
        ("a.jsonl", b'{"other": 1}'),
        ("a.jsonl", b'{"turns": []}'),
        ("a.jsonl", b"[]"),
        ("a.jsonl", b"[" * 100_000),
        ("a.jsonl.gz", b"no gzip"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.(txt|jsonl)"):
        prompts.read_prompts(path)
    with pytest.raises(InputError, match="absent"):
        prompts.read_prompts(tmp_path / "absent")
