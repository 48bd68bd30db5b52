"""Report of drafting: the `speculation` of the JSON object, its lines, table and charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from edge.apps.measure import plots
from edge.apps.measure.page import Drawing
from edge.apps.measure.statistics import spread
from edge.apps.measure.table import ABSENT, FigureTable, two
from edge.apps.profile.draft_costs import acceptance_rate
from edge.apps.profile.drafts import Drafted, DraftRun, DraftSide, total
from edge.runtime.speculate.accept import EXACT
from edge.runtime.speculate.shape import LOOK_UP, Shape

Facts = dict[str, Any]


def to_dict(found: Drafted, absent: dict[str, str]) -> Facts:
    """Return the `speculation` object. `acceptance_length` and `speedup` are a stable interface.

    Times are in milliseconds, medians over repetitions. In the keys, a round is one draft and its
    verify run.
    """
    request, costs, sums = found.request, found.costs, found.speculation
    rounds = [total(runs) for runs in found.drafted.rounds]
    gain, drafted = found.interval, sums.rounds > 0
    # a bandit may try no draft in a whole round of answers
    drafting = [run for run in rounds if run.speculation and run.speculation.rounds]
    if found.slowest_tenth is None:
        absent["slowest_tenth_speedup"] = "no prompt yielded a second token in every round"
    if not drafted:
        absent["acceptance_length"] = f"{sums.drafter} drafted nothing in {sums.steps} steps"
    if not found.runs_cost:
        absent["theoretical_speedup"] = (
            "the drafter was given up"
            if sums.problem
            else "drafts that go through text have no fixed cost per token"
        )
    return {
        "draft": request.draft,
        "draft_tokens": request.tokens,
        "draft_tree": list(tree) if isinstance(tree := request.tree, tuple) else tree,
        "draft_auto": not request.fixed,
        "accept": request.accept,
        "lossy": request.accept != EXACT.name,
        "prompts": len(request.prompts),
        "prompts_from": request.source,
        "acceptance_length": sums.acceptance_length,
        "speedup": found.speedup,
        "speedup_interval": None if gain.low is None else [gain.low, gain.high],
        "slowest_tenth_speedup": found.slowest_tenth,
        "speedup_by_prompt": [*found.by_prompt()],
        "theoretical_speedup": found.theoretical,
        "acceptance_rate": _alpha(found),
        "tokens_per_s": {
            "plain": _rates(found.plain),
            "drafted": _rates(found.drafted),
        },
        "sources": _sources(found),
        "rounds": sums.rounds,
        "plain_steps": sums.steps,
        "drafted_tokens": sums.drafted,
        "accepted_tokens": sums.accepted,
        "draft_ms": _median_ms(drafting, _draft_s) if drafted else None,
        "verify_ms": _median_ms(drafting, _verify_s) if drafted else None,
        "overhead_ms": _median_ms(rounds, _overhead_s),
        "overhead_share": found.drafted.overhead_share,
        "plain_overhead_share": found.plain.overhead_share,
        "reading_ms": 1e3 * median(run.reading for run in rounds) / len(request.prompts),
        "step_ms": 1e3 * costs.step,
        "draft_step_ms": None if costs.draft_step is None else 1e3 * costs.draft_step,
        "rewind_share": _rewind(found),
        "shapes": [*_shapes(found)],
        "problem": sums.problem,
    }


def _sources(drafted: Drafted) -> Facts:
    """Return the counts of each source of drafts."""
    return {
        source: {
            "rounds": share.rounds,
            "drafted_tokens": share.drafted,
            "accepted_tokens": share.accepted,
            "acceptance_length": 1 + share.accepted / share.rounds,
        }
        for source, share in drafted.speculation.sources.items()
    }


def _shapes(drafted: Drafted) -> Iterator[Facts]:
    """Yield the shapes of drafts, most frequent first, with their costs in steps."""
    for shape, count in sorted(drafted.shapes().items(), key=lambda item: -item[1]):
        yield {
            "branches": list(shape.branches),
            "source": shape.source,
            "rounds": count,
            "draft_steps": drafted.price(shape).draft,
            "verify_steps": drafted.price(shape).verify,
            "rewind_share": drafted.costs.rewind[shape.branches],
        }


def _rates(side: DraftSide) -> Facts:
    rates = spread(side.rates())
    assert rates is not None  # a contest has at least one round
    return asdict(rates)


def _alpha(drafted: Drafted) -> float | None:
    """Return the formula's α for a single fixed chain; None for trees and several shapes."""
    shapes, length = drafted.speculation.shapes, drafted.speculation.acceptance_length
    depth = drafted.request.tokens
    if depth is None or length is None or (1,) * depth not in shapes:
        return None
    return acceptance_rate(length, depth)


def _rewind(drafted: Drafted) -> float | None:
    shapes = drafted.speculation.shapes
    count = sum(shapes.values())
    if not count:
        return None
    return sum(n * drafted.costs.rewind[shape] for shape, n in shapes.items()) / count


def _median_ms(rounds: Sequence[DraftRun], seconds: Any) -> float:
    """Return the median over repetitions, in milliseconds."""
    return 1e3 * float(median(seconds(run) for run in rounds))


def _draft_s(run: DraftRun) -> float:
    """Return seconds per round in the drafter, without its reading of prompts."""
    sums = run.speculation
    return (sums.draft_s - run.reading) / sums.rounds if sums else 0.0


def _verify_s(run: DraftRun) -> float:
    sums = run.speculation
    return sums.verify_s / sums.rounds if sums else 0.0


def _overhead_s(run: DraftRun) -> float:
    sums = run.speculation
    return run.overhead / max(1, sums.rounds + sums.steps) if sums else 0.0


# -- terminal -------------------------------------------------------------------------------------


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the figures of `to_dict` as text."""
    rates = facts["tokens_per_s"]
    interval = facts["speedup_interval"]
    within = "" if interval is None else f" (95 %: {interval[0]:.2f} to {interval[1]:.2f})"
    slowest = facts["slowest_tenth_speedup"]
    nine_of_ten = "" if slowest is None else f"; nine of ten prompts at least {slowest:.2f}"
    yield (
        f"drafting  {facts['draft']} on {facts['prompts']} prompts ({facts['prompts_from']}): "
        f"{rates['drafted']['p50']:.1f} tokens/s, {rates['plain']['p50']:.1f} without: "
        f"{facts['speedup']:.2f} times as fast{within}{nine_of_ten}"
    )
    if facts["lossy"]:
        yield (
            f"drafting  lossy: tokens are accepted by {facts['accept']}, so answers differ from "
            "those without drafts"
        )
    if facts["problem"]:
        yield f"drafting  {facts['draft']} was given up: {facts['problem']}"
    length = facts["acceptance_length"]
    if length is None:
        return
    shapes = (f"{named(row)} {row['rounds']}×" for row in facts["shapes"])
    yield (
        f"drafting  acceptance length {length:.2f} over {facts['rounds']} verify runs, and "
        f"{facts['plain_steps']} plain steps; shapes {', '.join(shapes)}"
    )
    yield (
        f"drafting  a round: {facts['draft_ms']:.3f} ms to draft, {facts['verify_ms']:.3f} ms to "
        f"verify; per round or step {facts['overhead_ms']:.3f} ms "
        f"({facts['overhead_share']:.1%} of all time) outside model runs, without drafts "
        f"{facts['plain_overhead_share']:.1%}; rewinding {facts['rewind_share']:+.1%} of a step; "
        f"reading a prompt {facts['reading_ms']:.2f} ms more"
    )
    if (theory := facts["theoretical_speedup"]) is not None:
        alpha = facts["acceptance_rate"]
        step, draft = facts["step_ms"], facts["draft_step_ms"]
        yield (
            f"drafting  the papers' formula expects {theory:.2f} from this acceptance"
            + ("" if alpha is None else f" (α {alpha:.2f})")
            + f", steps of {step:.3f} ms"
            + ("" if draft is None else f", the drafter's of {draft:.3f} ms ({draft / step:.2f})")
            + f", verify runs of {_average(facts['shapes'], 'verify_steps'):.2f} steps"
        )


def named(row: Mapping[str, Any]) -> str:
    """Return the name of a shape, marked if it was looked up."""
    shape = Shape(tuple(row["branches"]))
    return f"look-up of {shape}" if row["source"] == LOOK_UP else str(shape)


def _average(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the average over rounds, of which there is at least one."""
    weighted = sum(row["rounds"] * row[name] for row in rows)
    return float(weighted / sum(row["rounds"] for row in rows))


def shapes(facts: Mapping[str, Any]) -> FigureTable:
    """Return the table of draft shapes and their costs in steps."""
    cells = []
    for row in facts["shapes"]:
        shape = Shape(tuple(row["branches"]))
        chain = shape.chain and row["source"] != LOOK_UP
        cells.append((
            f"chain of {shape}" if chain else named(row), str(row["rounds"]), str(shape.nodes),
            two(row["draft_steps"]), two(row["verify_steps"]), f"{row['rewind_share']:+.2f}",
        ))  # fmt: skip
    head = ("draft, in steps", "runs", "tokens", "to draft", "to verify", "to rewind")
    return FigureTable(head, cells)


# -- page -----------------------------------------------------------------------------------------


def cards(facts: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the headline figures."""
    rates = facts["tokens_per_s"]
    return f"Drafting by {facts['draft']}, against none", {
        "times as fast": two(facts["speedup"], ABSENT),
        "nine of ten prompts, at least": two(facts["slowest_tenth_speedup"], ABSENT),
        "acceptance length": two(facts["acceptance_length"], ABSENT),
        "by the papers' formula": two(facts["theoretical_speedup"], ABSENT),
        "tokens/s": f"{rates['drafted']['p50']:.1f}",
        "tokens/s without": f"{rates['plain']['p50']:.1f}",
    }


def drawings(facts: Mapping[str, Any]) -> Iterator[Drawing]:
    """Draw the gain of every prompt, and where a round's time goes."""
    labels = ("prompts, slowest first", "times as fast as without drafts")
    if speedups := facts["speedup_by_prompt"]:
        yield Drawing("What drafting gains", "", plots.by_prompt(speedups, labels))
    if facts["acceptance_length"] is None:
        return
    rows = {
        "drafting": facts["draft_ms"],
        "verifying and choosing": facts["verify_ms"],
        "of these outside model runs": facts["overhead_ms"],
        "a plain step of the model": facts["step_ms"],
        "a step of the drafter": facts["draft_step_ms"],
    }
    # noise can make the runtime's own time negative, which no bar can show
    shown = [(name, max(0.0, value)) for name, value in rows.items() if value is not None]
    title = "Where the time of a draft and its verification goes"
    yield Drawing(title, "", plots.bars(shown, "{:.3f} ms".format))
