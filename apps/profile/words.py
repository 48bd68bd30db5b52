"""Terminal output of a measurement: llama-bench's table, latencies, definitions, absent figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge.apps.measure.run_cost import ranked
from edge.apps.measure.table import FigureTable, ms, plus_minus, shares
from edge.apps.profile import draft_report
from edge.apps.profile.report import backend, inside
from edge.apps.units import megabytes

Facts = Mapping[str, Any]
SHOWN = 8
WIDEST = 4  # a ratio's interval is not shown if its ends differ by more than this factor
SPREAD = ("mean", "deviation", "p50", "p90", "p99")


def parts(facts: Facts) -> Iterator[FigureTable | str]:
    """Yield all tables and lines. Single repetitions are only in `--json` and `--jsonl`."""
    sides = side_by_side(facts)
    yield _speeds(sides)
    yield latencies(sides)
    if any(side["contexts"] for side in sides):
        yield contexts(sides)
    if "ratio" in facts:
        yield ratios(facts)
    if facts.get("speculation", {}).get("shapes"):
        yield draft_report.shapes(facts["speculation"])
    yield from lines(facts)


def lines(facts: Facts) -> Iterator[str]:
    """Yield the lines that follow the tables."""
    for side in side_by_side(facts):
        yield from _memory(side)
        yield from _energy(side)
        yield from _roofline(side)
        for name, cost in side["breakdown"].items():
            yield f"breakdown  {side['name']} {name}: {cost['total_ms']:.2f} ms while profiled"
            yield from shares(costs(cost, SHOWN), cost["total_ms"])
            if layers := cost["layers_ms"]:
                yield "  layers: " + ", ".join(f"{n} {spent:.3f}" for n, spent in layers.items())
    if "speculation" in facts:
        yield from draft_report.lines(facts["speculation"])
    yield from _machine(facts["machine"])
    yield f"measured  {facts['repetitions']} repetitions after {facts['warmup']} of warm-up; " + (
        inside(facts["temperature"])
    )
    yield from (f"{name}: {facts['definitions'][name]}" for name in _printed_definitions(facts))
    yield from (f"absent  {name}: {reason}" for name, reason in facts["absent"].items())
    yield from (f"note  {note}" for note in facts["notes"])
    yield from (f"warning  {warning}" for warning in facts["warnings"])


def _printed_definitions(facts: Facts) -> Iterator[str]:
    """Yield the names of the definitions whose figures were printed."""
    sides = side_by_side(facts)
    printed = {
        "context": any(side["contexts"] for side in sides),
        "ratio": "ratio" in facts,
        "breakdown": any(side["breakdown"] for side in sides),
        "roofline": any(side["roofline"] for side in sides),
        "drafting": "speculation" in facts,
        "energy": any(test["energy"] for side in sides for test in side["tests"]),
    }
    return (name for name in facts["definitions"] if printed.get(name, True))


# -- tables ---------------------------------------------------------------------------------------


def _speeds(sides: Sequence[Facts]) -> FigureTable:
    """Return llama-bench's table: pp is a prompt, tg generated tokens, @ d at depth d."""
    rows = []
    for side in sides:
        options = "".join(f" {name}" for name in ("spin", "pin") if side[name])
        fixed = (
            side["name"], megabytes(side["weight_bytes"]), f"{side['parameters'] / 1e6:.2f} M",
            backend(side) + options, str(side["threads"]),
        )  # fmt: skip
        for test in side["tests"]:
            prompt, count = test["prompt_tokens"], test["generated_tokens"]
            rows.append((*fixed, f"pp{prompt}", plus_minus(test["prefill_tokens_per_s"])))
            rows.append((*fixed, f"tg{count} @ d{prompt}", plus_minus(test["decode_tokens_per_s"])))
    head = ("model", "size", "params", "backend", "threads", "test", "t/s")
    return FigureTable(head, rows, words=(0, 3))


def latencies(sides: Sequence[Facts]) -> FigureTable:
    """Return the table of TTFT, TPOT, ITL and TTLT at every length."""
    rows = []
    for side in sides:
        for test in side["tests"]:
            for name in ("ttft", "tpot", "itl", "ttlt"):
                summary = test[f"{name}_ms"] or {}
                values = (ms(summary.get(key)) for key in SPREAD)
                rows.append((f"{side['name']} {name.upper()}", str(test["prompt_tokens"]), *values))
    return FigureTable(("ms", "prompt", "mean", "±", "p50", "p90", "p99"), rows)


def contexts(sides: Sequence[Facts]) -> FigureTable:
    """Return the table of step times against context; for Mamba they are constant."""
    rows = [
        (side["name"], str(row["context"]), ms(row["step_ms"]["p50"]), ms(row["step_ms"]["p90"]),
         ms(row["prefill_ms"]))
        for side in sides
        for row in side["contexts"]
    ]  # fmt: skip
    return FigureTable(("ms per step after", "tokens", "p50", "p90", "prefill, ms"), rows)


def ratios(facts: Facts) -> FigureTable:
    """Return the table of this ÷ the other at every length."""
    rows = []
    for row in facts["ratio"]:
        for name in ("ttft", "tpot", "ttlt"):
            if ratio := row[name]:
                prompt = str(row["prompt_tokens"])
                rows.append((name.upper(), prompt, f"{ratio['value']:.3f}", _interval(ratio)))
    return FigureTable(("this ÷ the other", "prompt", "ratio", "95 % interval"), rows)


def _interval(ratio: Facts) -> str:
    """Format the interval of a ratio, or say that it is too wide for lack of repetitions."""
    low, high = ratio["low"], ratio["high"]
    if low is None or high > WIDEST * low:
        return f"too few repetitions (-r, now {ratio['pairs']})"
    return f"{low:.3f} to {high:.3f}"


# -- lines ----------------------------------------------------------------------------------------


def costs(cost: Facts, most: int) -> list[tuple[str, float]]:
    """Return milliseconds by op of the model, or by operator if nodes could not be identified."""
    times = cost["parts_ms"] or {op: row["ms"] for op, row in cost["ops"].items()}
    return [*ranked(times, most), ("between operators", cost["between_ms"])]


def _memory(side: Facts) -> Iterator[str]:
    if memory := side["memory"]:
        yield (
            f"memory  {side['name']}: at most {megabytes(memory['peak'])}; anonymous "
            f"{megabytes(memory['anonymous'])}, file-backed {megabytes(memory['file'])}; "
            f"{megabytes(memory['program']['total'])} of it is the program without a model"
        )
    cache = side["kv_cache_bytes"]
    yield f"state  {side['name']}: {megabytes(side['state_bytes'])}" + (
        f", and KV caches of {megabytes(cache)} for {side['kv_cache_tokens']} tokens"
        if cache
        else ", at any length"
    )


def _energy(side: Facts) -> Iterator[str]:
    for test in side["tests"]:
        for source, phases in (test["energy"] or {}).items():
            for phase, row in phases.items():
                rails = ", ".join(f"{rail} {watts:.2f} W" for rail, watts in row["watts"].items())
                per_joule = row["tokens_per_joule"]
                tokens = "" if per_joule is None else f"; {per_joule:.2f} tokens per joule"
                yield f"energy  {phase} @ {test['prompt_tokens']}, {source}: {rails}{tokens}"


def _roofline(side: Facts) -> Iterator[str]:
    roofline = side["roofline"]
    for name, run in (roofline["runs"] if roofline else {}).items():
        yield (
            f"roofline  {side['name']} {name} of {run['tokens']}: {run['ms']:.2f} ms; reading "
            f"{megabytes(run['bytes'])} takes {run['bound_ms']:.2f} ms at best "
            f"({run['share_of_bandwidth']:.0%} of the measured bandwidth)"
        )


def _machine(machine: Facts) -> Iterator[str]:
    yield (
        f"machine  {machine['board'] or machine['cpu']}, {machine['usable_cpus']} CPUs, "
        f"{megabytes(machine['memory_bytes'])}; others used {machine['used_by_others']:.0%}"
    )
    after = machine["after"]
    clock, temperatures = after["clock_mhz"], after["temperature_c"]
    conditions = {
        "power mode": machine["power_mode"],
        "governor": machine["governor"],
        "clocks": clock and f"{clock['min']:.0f} to {clock['max']:.0f} MHz",
        "temperature": ", ".join(f"{name} {value:.0f} °C" for name, value in temperatures.items()),
        "throttled": machine["throttled"] is not None and (", ".join(machine["throttled"]) or "no"),
    }
    if shown := ", ".join(f"{name} {value}" for name, value in conditions.items() if value):
        yield f"conditions  {shown}"
    if gpu := machine["gpu"]:
        yield "GPU  " + ", ".join(f"{name} {value}" for name, value in gpu.items())


def side_by_side(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return this side, followed by the other if there is one."""
    return [facts, *([facts["against"]] if "against" in facts else [])]
