"""A measurement as one HTML page that needs nothing else: no script, no font, no address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from edge.apps.profiling import charts, draft_page
from edge.apps.profiling.breakdown import ranked
from edge.apps.profiling.charts import Series
from edge.apps.profiling.definitions import inside
from edge.apps.profiling.page_parts import cards, section, table
from edge.apps.profiling.report import backend, side_by_side
from edge.apps.profiling.run import Result
from edge.apps.profiling.table import lines, ms, name_of, plus_minus
from edge.apps.units import megabytes

Facts = Mapping[str, Any]
_BINS, _PARTS = 48, 12
NOUNS = {"decode": "step", "prefill": "chunk of prefill"}
_STYLE = """
:root{--ink:#1c1e21;--soft:#5c6470;--line:#d9dde3;--paper:#fff;--card:#f5f6f8;
--s0:#2563c9;--s1:#d1730a}
@media (prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#a2a9b4;--line:#3a404a;
--paper:#15181c;--card:#1f242b;--s0:#6ea2f5;--s1:#f0a04b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
max-width:1340px;margin:0 auto;padding:24px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:0 0 6px}
p{margin:4px 0;color:var(--soft)}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:20px;
margin-top:20px}
.cards{display:flex;flex-wrap:wrap;gap:10px;margin-top:16px}
.card{background:var(--card);border-radius:8px;padding:8px 14px}
.card b{display:block;font-size:20px}
section{background:var(--card);border-radius:8px;padding:14px 16px;min-width:0;overflow-x:auto}
.warning{border-left:4px solid var(--s1);padding:6px 12px;background:var(--card);color:var(--ink)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:3px 7px;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
dt{font-weight:600}dd{margin:0 0 6px;color:var(--soft)}
pre{white-space:pre-wrap;color:var(--soft);margin:0;font-size:13px}
svg{width:100%;height:auto;display:block}
svg text{font-size:11px;fill:var(--soft)}
.key{display:inline-block;width:10px;height:10px;border-radius:2px;margin:0 4px 0 10px}
.grid{stroke:var(--line);stroke-width:1}
.line{fill:none;stroke-width:2}.line.bound{stroke:var(--soft)}.dot{stroke:none}.band{opacity:.18}.bar{opacity:.75}
.line.s0,.line.s2{stroke:var(--s0)}.line.s1,.line.s3{stroke:var(--s1)}
.dot.s0,.band.s0,.bar.s0,.key.s0{fill:var(--s0);background:var(--s0)}
.dot.s1,.band.s1,.bar.s1,.key.s1{fill:var(--s1);background:var(--s1)}
"""


def render(facts: Facts, result: Result) -> str:
    """The page. Everything a bundle says of itself is escaped."""
    sides = side_by_side(facts)
    sections = [
        *_context(sides),
        *_gaps(sides, result),
        *_breakdowns(sides),
        *_roofline(sides),
        *_ratio(facts),
        *(draft_page.sections(facts["speculation"]) if "speculation" in facts else ()),
        section("Every length", _tests(sides)),
        section("In words", f"<pre>{escape(chr(10).join(_words(facts)))}</pre>"),
        section("Definitions", _definitions(facts["definitions"])),
        section("Absent", _definitions(facts["absent"]) or "<p>nothing</p>"),
    ]
    title = escape(" against ".join(name_of(side) for side in sides))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>edge profile: {title}</title><style>{_STYLE}</style></head><body>"
        f"{_heading(facts, title, len(sides) > 1)}{_cards(sides)}"
        f'<div class="grid2">{"".join(sections)}</div></body></html>\n'
    )


# -- above ----------------------------------------------------------------------------------------


def _heading(facts: Facts, title: str, several: bool) -> str:
    machine = facts["machine"]
    where = f"{machine['board'] or machine['cpu']}, {facts['threads']} threads, {backend(facts)}"
    how = f"{facts['repetitions']} repetitions after {facts['warmup']} to warm up, " + (
        "in turn, " if several else ""
    )
    warnings = (f'<p class="warning">{escape(text)}</p>' for text in facts["warnings"])
    return (
        f"<h1>{title}</h1><p>{escape(where)}; {how}{escape(facts['date'])}</p>"
        f"<p>{escape(inside(facts['temperature']))}</p>{''.join(warnings)}"
    )


def _cards(sides: Sequence[Facts]) -> str:
    out = []
    for number, side in enumerate(sides):
        test, peak = side["tests"][0], side["peak_memory_bytes"]
        figures = {
            "TTFT, ms": ms(side["ttft_ms"]),
            "TPOT, ms": ms(side["tpot_ms"]),
            "TTLT, ms": ms(side["ttlt_ms"]),
            f"prefill of {test['prompt_tokens']}, tokens/s": plus_minus(
                test["prefill_tokens_per_s"]
            ),
            "decode, tokens/s": plus_minus(test["decode_tokens_per_s"]),
            "peak memory": "absent" if peak is None else megabytes(peak),
            "state": megabytes(side["state_bytes"]),
        }
        out.append((_keys(sides, number) if len(sides) > 1 else "") + cards(figures))
    return "".join(out)


# -- pictures -------------------------------------------------------------------------------------


def _context(sides: Sequence[Facts]) -> Iterator[str]:
    """The flat line."""
    series = []
    for side in sides:
        if rows := side["contexts"]:
            steps = [row["step_ms"] for row in rows]
            points = [(row["context"], step["p50"]) for row, step in zip(rows, steps, strict=True)]
            low = [step["p50"] for step in steps]
            series.append(Series(name_of(side), points, low, [step["p90"] for step in steps]))
    if not series:
        return
    x = charts.log_axis([point[0] for line in series for point in line.points], 2)
    y = charts.linear_axis([value for line in series for value in line.high])
    chart = charts.line_chart(
        series, x, y, ("tokens read before", "ms a step"), (_count, _number)
    )  # fmt: skip
    note = "median, and shaded up to the 90th percentile. Constant memory makes it a flat line."
    yield section("Latency against context", _keys(sides) + f"<p>{note}</p>" + chart)


def _gaps(sides: Sequence[Facts], result: Result) -> Iterator[str]:
    rows = []
    for side, measured in zip(sides, result.sides.values(), strict=True):
        gaps = [1e3 * gap for sample in measured.samples[0] for gap in sample.gaps]
        if gaps:
            rows.append((name_of(side), gaps))
    if not rows:
        return
    chart = charts.histogram(rows, _BINS, "ms between two tokens", _number)
    lines = []
    for side in sides:
        if spread := side["itl_ms"]:
            p50, p90, p99 = (ms(spread[name]) for name in ("p50", "p90", "p99"))
            lines.append(f"<p>{escape(name_of(side))}: p50 {p50}, p90 {p90}, p99 {p99} ms</p>")
    note = "<p>The last bar takes all that took longer.</p>"
    yield section("Inter-token latency", _keys(sides) + "".join(lines) + note + chart)


def _breakdowns(sides: Sequence[Facts]) -> Iterator[str]:
    for number, side in enumerate(sides):
        for name, cost in side["breakdown"].items():
            total = cost["total_ms"]
            parts = cost["parts_ms"] or {op: found["ms"] for op, found in cost["ops"].items()}
            rows = [*ranked(parts, _PARTS), ("between operators", cost["between_ms"])]
            pictures = charts.bars(rows, lambda v, t=total: f"{ms(v)} ms, {v / t:.0%}", number)  # type: ignore[misc]
            if layers := cost["layers_ms"]:
                pictures += "<h2>by layer</h2>" + charts.bars(
                    list(layers.items()), lambda v: f"{ms(v)} ms", number
                )
            head = f"<p>{ms(total)} ms while profiled</p>"
            yield section(
                f"Where the time of a {NOUNS[name]} goes: {name_of(side)}", head + pictures
            )


def _roofline(sides: Sequence[Facts]) -> Iterator[str]:
    """Operations a second against operations a byte, under the roof seen here."""
    points, roof = [], None
    for side in sides:
        if found := side["roofline"]:
            roof = found["roof"]
            runs = found["runs"]
            spots = [(run["flops_per_byte"], run["flops_per_s"] / 1e9) for run in runs.values()]
            points.append(Series(name_of(side), spots, names=list(runs)))
    if roof is None or not any(series.points for series in points):
        return
    bandwidth = max(roof["read_bytes_per_s"], roof["copy_bytes_per_s"]) / 1e9
    flops = roof["fp32_flops_per_s"]
    spots = [point for series in points for point in series.points]
    x = charts.log_axis([0.5, *(spot[0] for spot in spots), 100.0])
    corners = [(x.low, x.low * bandwidth), (x.high, x.high * bandwidth)]
    if flops and x.low < flops / 1e9 / bandwidth < x.high:
        corners[1:] = [(flops / 1e9 / bandwidth, flops / 1e9), (x.high, flops / 1e9)]
    y = charts.log_axis([point[1] for point in (*corners, *spots)])
    chart = charts.line_chart(
        [Series("roof", corners)], x, y, ("operations a byte", "billion operations a second"),
        (_count, _count), dots_only=points,
    )  # fmt: skip
    note = f"<p>Measured here: {bandwidth:.1f} GB/s. " + (
        "Arithmetic was not measured.</p>"
        if flops is None
        else f"{flops / 1e9:.0f} GFLOP/s of fp32 products; left of the corner memory is the limit. "
        "Products of 8-bit integers may lie above the flat part.</p>"
    )
    yield section("Roofline", _keys(sides) + note + chart)


def _ratio(facts: Facts) -> Iterator[str]:
    if "ratio" not in facts:
        return
    rows = []
    for row in facts["ratio"]:
        for name in ("ttft", "tpot", "ttlt"):
            if found := row[name]:
                low, high = found["low"], found["high"]
                interval = "absent" if low is None else f"{low:.3f} to {high:.3f}"
                rows.append((name.upper(), row["prompt_tokens"], f"{found['value']:.3f}", interval))
    head = ("", "prompt", "ratio", "95 % interval")
    yield section("This ÷ the other", table(head, rows))


# -- words ----------------------------------------------------------------------------------------


def _tests(sides: Sequence[Facts]) -> str:
    rows = []
    for side in sides:
        for test in side["tests"]:
            for name in ("ttft", "tpot", "itl", "ttlt"):
                spread = test[f"{name}_ms"] or {}
                keys = ("mean", "deviation", "p50", "p90", "p99")
                values = (ms(spread.get(key)) for key in keys)
                title = f"{name_of(side)} {name.upper()}, ms"
                rows.append((title, test["prompt_tokens"], *values))
    return table(("", "prompt", "mean", "±", "p50", "p90", "p99"), rows)


def _words(facts: Facts) -> Iterator[str]:
    """The terminal's lines without those that stand elsewhere on the page."""
    wanted = (
        "memory",
        "state",
        "energy",
        "roofline",
        "machine",
        "conditions",
        "GPU",
        "measured",
        "note",
    )
    for line in lines(facts):
        if line.startswith(tuple(f"{word}  " for word in wanted)):
            yield line


def _definitions(values: Mapping[str, str]) -> str:
    rows = (f"<dt>{escape(n)}</dt><dd>{escape(text)}</dd>" for n, text in values.items())
    joined = "".join(rows)
    return f"<dl>{joined}</dl>" if joined else ""


def _keys(sides: Sequence[Facts], only: int | None = None) -> str:
    """Which colour is whose; nothing to say of a single one."""
    if len(sides) < 2:
        return ""
    keys = (
        f'<span class="key s{number}"></span>{escape(name_of(side))}, {escape(backend(side))}'
        for number, side in enumerate(sides)
        if only in (None, number)
    )
    return f"<p>{''.join(keys)}</p>"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 1 else f"{value:g}"
