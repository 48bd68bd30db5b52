"""HTML page of a measurement. Without matplotlib it has no charts, and says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge.apps.measure import page, plots
from edge.apps.measure.page import Drawing
from edge.apps.measure.plots import Curve
from edge.apps.measure.table import ABSENT, ms, plus_minus
from edge.apps.profile import draft_report
from edge.apps.profile.report import backend, inside
from edge.apps.profile.run import ProfileResult
from edge.apps.profile.words import costs, parts, side_by_side
from edge.apps.units import megabytes

Facts = Mapping[str, Any]
NO_PICTURES = f"The page has no charts: they need matplotlib ({plots.REMEDY})."
_BINS, _PARTS = 48, 12
_NOUNS = {"decode": "step", "prefill": "chunk of prefill"}


def render(facts: Facts, result: ProfileResult) -> str:
    """Render the page: the charts, and everything that the terminal shows.

    Text from bundles is escaped.
    """
    sides, charts = side_by_side(facts), plots.available()
    machine, drafting = facts["machine"], facts.get("speculation")
    machine_line = (
        f"{machine['board'] or machine['cpu']}, {facts['threads']} threads, {backend(facts)}"
    )
    repetitions = f"{facts['repetitions']} repetitions after {facts['warmup']} of warm-up"
    turns = ", in turn" if len(sides) > 1 else ""
    notes = [f"{machine_line}; {repetitions}{turns}, {facts['date']}", inside(facts["temperature"])]
    cards = [_cards(side, len(sides) > 1) for side in sides]
    return page.render(
        "edge profile",
        " against ".join(side["name"] for side in sides),
        notes if charts else [*notes, NO_PICTURES],
        facts["warnings"],
        [*cards, draft_report.cards(drafting)] if drafting else cards,
        _drawings(facts, sides, result) if charts else (),
        parts(facts),
    )


def _cards(side: Facts, several: bool) -> tuple[str, dict[str, str]]:
    test, peak = side["tests"][0], side["peak_memory_bytes"]
    return side["name"] if several else "", {
        "TTFT, ms": ms(side["ttft_ms"]),
        "TPOT, ms": ms(side["tpot_ms"]),
        "TTLT, ms": ms(side["ttlt_ms"]),
        f"prefill of {test['prompt_tokens']}, tokens/s": plus_minus(test["prefill_tokens_per_s"]),
        "decode, tokens/s": plus_minus(test["decode_tokens_per_s"]),
        "peak memory": ABSENT if peak is None else megabytes(peak),
        "state": megabytes(side["state_bytes"]),
    }


def _drawings(facts: Facts, sides: Sequence[Facts], result: ProfileResult) -> Iterator[Drawing]:
    yield from _context(sides)
    yield from _gaps(sides, result)
    yield from _breakdowns(sides)
    yield from _roofline(sides)
    if "speculation" in facts:
        yield from draft_report.drawings(facts["speculation"])


def _context(sides: Sequence[Facts]) -> Iterator[Drawing]:
    """Draw the step time against context."""
    curves = [
        Curve(
            side["name"],
            [(row["context"], row["step_ms"]["p50"]) for row in side["contexts"]],
            high=[row["step_ms"]["p90"] for row in side["contexts"]],
        )
        for side in sides
        if side["contexts"]
    ]
    if curves:
        labels = ("tokens of context", "ms per step")
        yield Drawing(
            "Latency against context",
            "Median, shaded up to the 90th percentile. Constant memory keeps it flat; attention "
            "makes it rise.",
            plots.lines(curves, labels, "{:g}".format),
        )


def _gaps(sides: Sequence[Facts], result: ProfileResult) -> Iterator[Drawing]:
    rows = []
    for side, measured in zip(sides, result.sides.values(), strict=True):
        if gaps := [1e3 * gap for sample in measured.samples[0] for gap in sample.gaps]:
            rows.append((side["name"], gaps))
    if rows:
        chart = plots.histogram(rows, _BINS, "ms between two tokens")
        yield Drawing("Inter-token latency", "The last bar holds all longer gaps.", chart)


def _breakdowns(sides: Sequence[Facts]) -> Iterator[Drawing]:
    for number, side in enumerate(sides):
        for name, cost in side["breakdown"].items():
            total = cost["total_ms"]

            def label(value: float, total: float = total) -> str:
                return f"{ms(value)} ms, {value / total:.0%}"

            title = f"Where the time of a {_NOUNS[name]} goes: {side['name']}"
            bars = plots.bars(costs(cost, _PARTS), label, number)
            yield Drawing(title, f"{ms(total)} ms while profiled", bars)
            if layers := cost["layers_ms"]:
                layer_bars = plots.bars(list(layers.items()), lambda v: f"{ms(v)} ms", number)
                yield Drawing(f"{title}, by layer", "", layer_bars)


def _roofline(sides: Sequence[Facts]) -> Iterator[Drawing]:
    """Draw operations per second against operations per byte, under the measured roof."""
    rooflines = [(side, side["roofline"]) for side in sides if side["roofline"]]
    curves = []
    for side, roofline in rooflines:
        runs = roofline["runs"]
        points = [(run["flops_per_byte"], run["flops_per_s"] / 1e9) for run in runs.values()]
        curves.append(Curve(side["name"], points, labels=list(runs)))
    points = [point for curve in curves for point in curve.points]
    if not points:
        return
    roof = rooflines[-1][1]["roof"]
    bandwidth = max(roof["read_bytes_per_s"], roof["copy_bytes_per_s"]) / 1e9
    flops = roof["fp32_flops_per_s"]
    low, high = min(0.1, *(x for x, _ in points)), max(100.0, *(x for x, _ in points))
    corners = [(low, low * bandwidth), (high, high * bandwidth)]
    if flops and low < flops / 1e9 / bandwidth < high:
        corners[1:] = [(flops / 1e9 / bandwidth, flops / 1e9), (high, flops / 1e9)]
    note = f"Measured here: {bandwidth:.1f} GB/s. " + (
        "Arithmetic was not measured."
        if flops is None
        else f"{flops / 1e9:.0f} GFLOP/s for fp32 products; memory is the limit left of the "
        "corner. Products of 8-bit integers may lie above the flat part."
    )
    labels = ("operations per byte", "billion operations per second")
    yield Drawing("Roofline", note, plots.roofline(curves, corners, labels))
