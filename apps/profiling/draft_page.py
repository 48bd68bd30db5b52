"""What drafting yields and costs, as sections of the page; of the facts of `draft_report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from edge.apps.profiling import charts
from edge.apps.profiling.charts import Series
from edge.apps.profiling.draft_report import named
from edge.apps.profiling.page_parts import cards, section, table
from edge.runtime.speculate.shape import LOOK_UP, Shape

Facts = Mapping[str, Any]


def sections(facts: Facts) -> Iterator[str]:
    """What it gains, where a round's time goes, and in which shapes, as far as anything was
    drafted.
    """
    yield section(f"Drafting by {facts['draft']}, against none", _gain(facts))
    if facts["acceptance_length"] is None:
        return
    yield section("Where the time of a draft and its verification goes", _round(facts))
    yield section("Shapes of drafts", _shapes(facts["shapes"]))


def _gain(facts: Facts) -> str:
    rates = facts["tokens_per_s"]
    figures = {
        "times as quick": _two(facts["speedup"]),
        "nine of ten prompts, at least": _two(facts["slowest_tenth_speedup"]),
        "acceptance length": _two(facts["acceptance_length"]),
        "by the papers' formula": _two(facts["theoretical_speedup"]),
        "tokens/s": f"{rates['drafted']['p50']:.1f}",
        "tokens/s without": f"{rates['plain']['p50']:.1f}",
    }
    notes = [
        f"{facts['prompts']} prompts ({facts['prompts_from']}), each answered with drafts and "
        f"without in turn: {facts['rounds']} verifying runs beside {facts['plain_steps']} plain "
        "steps. The picture has every prompt, the slowest first; the line is plain speed."
    ]
    if facts["lossy"]:
        notes.append(f"Lossy: tokens stood by {facts['accept']}, so the answers are not the same.")
    if facts["problem"]:
        notes.append(f"{facts['draft']} was given up: {facts['problem']}")
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return cards(figures) + said + _by_prompt(facts["speedup_by_prompt"])


def _by_prompt(speedups: Sequence[float]) -> str:
    if not speedups:
        return ""
    spots = [(float(place), value) for place, value in enumerate(sorted(speedups), 1)]
    x, y = charts.linear_axis([place for place, _ in spots]), charts.linear_axis([1.0, *speedups])
    plain = Series("plain", [(x.low, 1.0), (x.high, 1.0)])
    dots = Series("with drafts", spots, names=[""] * len(spots))
    return charts.line_chart(
        [plain], x, y, ("prompts, the slowest first", "times as quick as without drafts"),
        (_short, _short), dots_only=[dots],
    )  # fmt: skip


def _round(facts: Facts) -> str:
    rows = [
        ("drafting", facts["draft_ms"]),
        ("verifying and choosing", facts["verify_ms"]),
        ("of these in no model's run", facts["overhead_ms"]),
        ("a plain step of the model", facts["step_ms"]),
    ]
    own = facts["draft_step_ms"]
    if own is not None:
        rows.append(("a step of the drafter", own))
    said = (
        f"{facts['overhead_share']:.1%} of all time passed in no model's run, without drafts "
        f"{facts['plain_overhead_share']:.1%}. Going back took {facts['rewind_share']:+.1%} of a "
        f"step; reading a prompt takes {facts['reading_ms']:.2f} ms more."
    )
    # noise can make the runtime's own time negative, which no bar can show
    shown = [(name, max(0.0, value)) for name, value in rows]
    return charts.bars(shown, lambda value: f"{value:.3f} ms") + f"<p>{escape(said)}</p>"


def _shapes(rows: Sequence[Facts]) -> str:
    head = ("draft", "runs", "tokens", "to draft", "to verify", "going back")
    note = "<p>Of a tree the children at each depth. The last three are costs in steps.</p>"
    return table(head, [_shape(row) for row in rows]) + note


def _shape(row: Facts) -> tuple[object, ...]:
    shape = Shape(tuple(row["branches"]))
    return (
        f"chain of {shape}" if shape.chain and row["source"] != LOOK_UP else named(row),
        row["rounds"],
        shape.nodes,
        f"{row['draft_steps']:.2f}",
        f"{row['verify_steps']:.2f}",
        f"{row['rewind_share']:+.2f}",
    )


def _two(value: float | None) -> str:
    return "absent" if value is None else f"{value:.2f}"


def _short(value: float) -> str:
    return f"{value:.3g}"
