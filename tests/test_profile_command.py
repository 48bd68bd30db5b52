"""`edge profile` as people and scripts use it, on tiny bundles. Nothing here asserts a time."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from edge.apps.cli import main
from edge.apps.measure import page, plots
from edge.apps.measure.page import Drawing
from edge.apps.measure.plots import Curve
from edge.apps.measure.table import FigureTable
from edge.apps.profile.run import ProfileRequest, make_plan
from edge.errors import InputError
from tests.facts import facts, says
from tests.programs import ROOF_BUFFER, called, without_torch
from tests.session_models import bundle

FEW = ("-p", "12,20", "-n", "6", "-r", "2", "--context", "8,32", "--threads", "1")
FIGURES = {
    "ttft_ms", "tpot_ms", "ttlt_ms", "prefill_tokens_per_s", "decode_tokens_per_s",
    "peak_memory_bytes", "state_bytes",
}  # fmt: skip


def run(*arguments: object, hidden: Sequence[str] = ()) -> tuple[int, str, str]:
    return without_torch("profile", *arguments, hidden=hidden)


def here(*arguments: object) -> tuple[int, str, str]:
    """Run the same in this process, which has torch."""
    return called(main, "profile", *arguments)


@cache
def measured() -> tuple[dict[str, Any], str]:
    """Return the object and the page of one measurement of two bundles."""
    path = bundle("base").parent / "profile.html"
    code, out, err = run(
        bundle("base"), *FEW, "--against", bundle("chat"), "--json", "--html", path
    )
    assert code == 0, err
    return json.loads(out), path.read_text()


def test_json_has_the_interface(tmp_path: Path) -> None:
    facts, _ = measured()
    for side in (facts, facts["against"]):
        assert all(side[name] > 0 for name in FIGURES)
        itl = side["itl_ms"]
        assert 0 < itl["p50"] <= itl["p90"] <= itl["p99"] and itl["count"] == 2 * 5
        assert [test["prompt_tokens"] for test in side["tests"]] == [12, 20]
        assert [row["context"] for row in side["contexts"]] == [8, 32]
        assert all(row["step_ms"]["count"] == 2 * 16 for row in side["contexts"])
        first = side["tests"][0]
        assert first["ttft_ms"]["mean"] == side["ttft_ms"] < side["ttlt_ms"]
        assert first["decode_tokens_per_s"]["deviation"] is not None
        assert side["memory"]["anonymous"] > 0 and side["memory"]["file"] > 0
        assert side["breakdown"].keys() == {"decode", "prefill"}
        assert side["roofline"]["runs"]["decode"]["bound_ms"] > 0
        assert side["roofline"]["roof"]["buffer_bytes"] == ROOF_BUFFER
    assert facts["inside"]["sampling"] is True and facts["inside"]["tokenization"] is False
    assert facts["repetitions"] == 2 and facts["warmup"] == 1
    assert facts["fingerprint"] != facts["against"]["fingerprint"]


def test_ratio_is_of_the_two_sides() -> None:
    facts, _ = measured()
    assert [row["prompt_tokens"] for row in facts["ratio"]] == [12, 20]
    for row in facts["ratio"]:
        for name in ("ttft", "tpot", "ttlt"):
            found = row[name]
            assert found["low"] <= found["value"] <= found["high"] and found["pairs"] == 2


def test_what_is_null_is_named_with_its_reason() -> None:
    facts, _ = measured()
    machine, absent = facts["machine"], facts["absent"]
    assert all(reason for reason in absent.values())
    for name in ("governor", "power_mode", "gpu"):
        assert (machine[name] is None) == (name in absent), name
    assert (machine["throttled"] is None) == ("throttling" in absent)
    assert bool(machine["after"]["temperature_c"]) == ("temperature" not in absent)
    energies = [test["energy"] for test in facts["tests"]]
    assert ("energy" in absent) == (energies == [None, None])
    assert machine["trustworthy"] == (not any("other programs" in w for w in facts["warnings"]))


def test_table_for_people() -> None:
    code, out, err = run(bundle("hybrid"), "-n", "6", "-r", "2")
    assert code == 0, err
    assert re.search(r"\| hybrid fp32 +\| .* \| +(cpu|ort cpu) +\| .* \| +pp58 \|", out)
    assert "tg6 @ d58" in out and "repetition 2 of 2" in err and "repetition" not in out.split()[0]
    assert says(out, "note ", "58 tokens", "64")
    assert "TPOT: time per output token" in out and "KV caches of" in out
    assert says(out, "detokenization", "not")
    assert max(map(len, out.splitlines()[:20])) <= 160


def test_lines_are_repetitions() -> None:
    code, out, err = here(bundle("base"), *FEW, "--jsonl", "--no-breakdown")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["prompt_tokens"], row["repetition"]) for row in rows] == [
        (12, 0), (12, 1), (20, 0), (20, 1)]  # fmt: skip
    for row in rows:
        assert len(row["itl_ms"]) == 5 and row["ttft_ms"] < row["ttlt_ms"]
        assert row["tpot_ms"] == pytest.approx(sum(row["itl_ms"]) / 5)
        assert row["prefill_ms"] < row["ttft_ms"]


def test_one_token_and_one_repetition_lack_what_they_lack() -> None:
    code, out, err = here(
        bundle("base"), "-p", "8", "-n", "1", "-r", "1", "--context", "0", "--json",
        "--no-breakdown", "--warmup", "0", "--against", bundle("base"),
    )  # fmt: skip
    assert code == 0, err
    facts = json.loads(out)
    assert facts["tpot_ms"] is facts["itl_ms"] is facts["decode_tokens_per_s"] is None
    assert facts["ttft_ms"] == facts["ttlt_ms"] and facts["contexts"] == []
    assert facts["threads"] >= 1  # also when none were given
    assert facts["ratio"][0]["tpot"] is None and facts["ratio"][0]["ttft"]["low"] is None
    wanted = {"tpot_ms", "itl_ms", "contexts", "breakdown", "roofline", "interval of the ratio"}
    assert wanted <= facts["absent"].keys()


# -- the page -------------------------------------------------------------------------------------


class Outline(HTMLParser):
    """Refuses unbalanced tags; collects what a browser would fetch or run."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "object"):
            self.foreign.append(tag)
        self.foreign += [
            name
            for name, value in attributes
            if (name in ("src", "href") and not (value or "").startswith("#"))
            or name.startswith("on")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h2", "p"):
            self.titles.append(data)


def test_page_is_whole_and_stands_alone() -> None:
    _, text = measured()
    outline = Outline()
    outline.feed(text)
    assert outline.open == [] and outline.foreign == []
    assert not re.search(r"https?:|url\((?!#)|@import", text)
    wanted = {"Latency against context", "Inter-token latency", "Roofline"}
    assert wanted <= set(outline.titles)
    assert "Where the time of a step goes: base fp32" in outline.titles
    assert "this ÷ the other" in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 3 + 2 * 2 * 2  # three, and parts and layers of each run of each side
    for picture in pictures:
        tree = ET.fromstring(picture)
        known = {element.get("id") for element in tree.iter()}
        # nothing in it refers to another picture
        assert set(re.findall(r'(?:href="|url\()#(\w+)', picture)) <= known
        assert "#000000" not in picture  # dark pages have light ink


def test_page_escapes_what_a_bundle_is_called() -> None:
    bars = plots.bars([("<script>", 1.0), ("a&b $x$", 2.0)], str)
    assert "<script>" not in bars and "&lt;script&gt;" in bars and "a&amp;b $x$" in bars
    table = FigureTable(("<b>",), [("<i>",)])
    html = page.render("x", "<u>", ["<s>"], ["<q>"], [], [Drawing("<a>", "", "")], [table])
    assert not re.search("<[buisqa]>", html) and html.count("&lt;") == 7  # the title occurs twice


def drawn(svg: str) -> ET.Element:
    """Check that a picture contains only finite numbers."""
    assert not re.search(r"\b(nan|inf)\b", svg, re.IGNORECASE)
    return ET.fromstring(svg)


# not ResourceWarning: what another test left open may be found while this one runs
@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_pictures_of_few_and_equal_values() -> None:
    curve = Curve("x", [(128, 0.003)], high=[0.003])
    drawn(plots.lines([curve, curve], ("a", "b"), str))
    drawn(plots.histogram([("x", [3.0])], 10, "ms"))
    drawn(plots.bars([("x", 0.0)], str))
    drawn(plots.by_prompt([1.0], ("a", "b")))
    drawn(plots.roofline([Curve("x", [(1, 1)], labels=["y"])], [(0.1, 1), (9, 9)], ("a", "b")))


def test_histogram_counts_every_value() -> None:
    values = [1.0] * 7 + [2.0] * 2 + [50.0]
    with plots.picture() as made:
        plots.fill(made.axes, [("x", values)], 10)
        heights = [patch.get_height() for patch in made.axes.patches]  # type: ignore[attr-defined]
    assert len(heights) == 10 and sum(heights) == len(values)


def test_same_figures_give_the_same_picture() -> None:
    one, other = (plots.bars([("a", 1.0), ("b", 2.0)], str) for _ in range(2))
    assert one == other


def test_page_without_matplotlib_has_no_pictures_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    code, _, err = run(bundle("base"), *FEW, "--html", path, hidden=["matplotlib"])
    assert code == 0 and "mamba-edge[plots]" in err
    text = path.read_text()
    assert "<svg" not in text and "mamba-edge[plots]" in text and "breakdown  base" in text


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-p", "twelve"), "not a list of whole numbers"),
        (("-p", "0"), "lengths are 1 to"),
        (("-p", "9999999"), "lengths are 1 to"),
        (("--context", "1,,2"), "not a list of whole numbers"),
        (("--json", "--jsonl"), "together with --jsonl"),
        (("--html", "/nowhere/page.html"), "cannot be written"),
        (("--engine", "tensorrt"), "TensorRT"),
        (("--against", "tensorrt"), "TensorRT"),
        (("--against", "/nowhere/bundle"), "/nowhere/bundle"),
    ],
)
def test_refused_before_anything_is_measured(arguments: tuple[str, ...], words: str) -> None:
    code, out, err = here(bundle("base"), *arguments)
    usage = arguments[0] in ("-p", "--context", "--json")
    assert code == (2 if usage else 1) and out == "" and words in err and "repetition" not in err


def test_lengths_that_attention_cannot_hold_are_refused() -> None:
    hybrid = str(bundle("hybrid"))  # 64 positions
    with pytest.raises(InputError, match=facts("-p: ", "60 tokens", 8, "of 64 (", "at most 56")):
        make_plan(ProfileRequest(hybrid, prompts=(20, 60), generated=8))
    with pytest.raises(InputError, match=r"--context: 50 tokens"):
        make_plan(ProfileRequest(hybrid, prompts=(8,), generated=8, contexts=(20, 50)))
    plan, notes = make_plan(ProfileRequest(hybrid, generated=8))
    assert [len(prompt) for prompt in plan.prompts] == [56] and plan.depths == ()
    assert len(notes) == 2


def test_constant_memory_takes_any_length() -> None:
    plan, notes = make_plan(ProfileRequest(str(bundle("base")), prompts=(9000, 10), generated=8))
    assert [len(prompt) for prompt in plan.prompts] == [9000, 10] and notes == []
    assert plan.depths == (128, 512, 1024, 2048, 4096) and len(plan.context) == 4096


def test_against_is_a_bundle_or_an_engine() -> None:
    sides = ProfileRequest("a", against="b", engine="ort").sides
    assert sides == {"this": ("a", "ort"), "other": ("b", "ort")}
    assert ProfileRequest("a", against="cuda").sides["other"] == ("a", "cuda")
    with pytest.raises(InputError, match="--engine: unknown engine 'gpu'"):
        from edge.apps.profile.run import profile

        profile(ProfileRequest("demo", engine="gpu"))
