"""A measurement for a terminal: llama-bench's table, latencies, then what it means and lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from edge.apps.profiling import draft_report
from edge.apps.profiling.breakdown import ranked
from edge.apps.profiling.definitions import inside
from edge.apps.profiling.report import backend, side_by_side
from edge.apps.units import megabytes

Facts = Mapping[str, Any]
SHOWN = 8


def show(facts: Facts, console: Console) -> None:
    """Everything but single repetitions, which `--json` and `--jsonl` have."""
    sides = side_by_side(facts)
    console.print(_speeds(sides))
    console.print(_latencies(sides))
    if any(side["contexts"] for side in sides):
        console.print(_contexts(sides))
    if "ratio" in facts:
        console.print(_ratio(facts))
    for line in lines(facts):
        console.print(line, soft_wrap=True, highlight=False)


def lines(facts: Facts) -> Iterable[str]:
    """What is no table."""
    for side in side_by_side(facts):
        yield from _memory(side)
        yield from _energy(side)
        yield from _roofline(side)
        yield from _breakdown(side)
    if "speculation" in facts:
        yield from draft_report.lines(facts["speculation"])
    yield from _machine(facts["machine"])
    yield f"measured  {facts['repetitions']} repetitions after {facts['warmup']} to warm up; " + (
        inside(facts["temperature"])
    )
    for name, meaning in facts["definitions"].items():
        yield f"{name}: {meaning}"
    for name, reason in facts["absent"].items():
        yield f"absent  {name}: {reason}"
    for note in facts["notes"]:
        yield f"note  {note}"
    for warning in facts["warnings"]:
        yield f"warning  {warning}"


# -- tables ---------------------------------------------------------------------------------------


def _speeds(sides: Iterable[Facts]) -> Table:
    """As llama-bench prints it: pp is a prompt, tg generated tokens, @ d after so many tokens."""
    table = Table(box=box.MARKDOWN)
    for name in ("model", "size", "params", "backend", "threads", "test", "t/s"):
        table.add_column(
            name, justify="left" if name in ("model", "backend") else "right", no_wrap=True
        )
    for side in sides:
        fixed = (
            name_of(side), megabytes(side["weight_bytes"]), f"{side['parameters'] / 1e6:.2f} M",
            backend(side) + (" spin" if side["spin"] else ""), str(side["threads"]),
        )  # fmt: skip
        for test in side["tests"]:
            prompt, count = test["prompt_tokens"], test["generated_tokens"]
            table.add_row(*fixed, f"pp{prompt}", plus_minus(test["prefill_tokens_per_s"]))
            table.add_row(*fixed, f"tg{count} @ d{prompt}", plus_minus(test["decode_tokens_per_s"]))
    return table


def _latencies(sides: Iterable[Facts]) -> Table:
    table = Table(box=box.MARKDOWN)
    for name in ("ms", "prompt", "mean", "±", "p50", "p90", "p99"):
        table.add_column(name, justify="left" if name == "ms" else "right", no_wrap=True)
    for side in sides:
        for test in side["tests"]:
            for name in ("ttft", "tpot", "itl", "ttlt"):
                spread = test[f"{name}_ms"]
                values = [spread[key] if spread else None for key in (
                    "mean", "deviation", "p50", "p90", "p99")]  # fmt: skip
                table.add_row(
                    f"{name_of(side)} {name.upper()}", str(test["prompt_tokens"]), *map(ms, values)
                )
    return table


def _contexts(sides: Iterable[Facts]) -> Table:
    """The flat line: a step costs the same after any number of tokens."""
    table = Table(box=box.MARKDOWN)
    for name in ("ms a step after", "tokens", "p50", "p90", "prefill, ms"):
        table.add_column(name, justify="left" if name[:2] == "ms" else "right", no_wrap=True)
    for side in sides:
        for row in side["contexts"]:
            step = row["step_ms"]
            table.add_row(
                name_of(side), str(row["context"]), ms(step["p50"]), ms(step["p90"]),
                ms(row["prefill_ms"]),
            )  # fmt: skip
    return table


def _ratio(facts: Facts) -> Table:
    table = Table(box=box.MARKDOWN)
    for name in ("this ÷ the other", "prompt", "ratio", "95 % interval"):
        table.add_column(name, justify="left" if name[:4] == "this" else "right", no_wrap=True)
    for row in facts["ratio"]:
        for name in ("ttft", "tpot", "ttlt"):
            if found := row[name]:
                low, high = found["low"], found["high"]
                interval = "—" if low is None else f"{low:.3f} to {high:.3f}"
                table.add_row(
                    name.upper(), str(row["prompt_tokens"]), f"{found['value']:.3f}", interval
                )
    return table


# -- lines ----------------------------------------------------------------------------------------


def _memory(side: Facts) -> Iterable[str]:
    if memory := side["memory"]:
        yield (
            f"memory  {name_of(side)}: at most {megabytes(memory['peak'])}; anonymous "
            f"{megabytes(memory['anonymous'])}, file-backed {megabytes(memory['file'])}; of these "
            f"{megabytes(memory['program']['total'])} are the program's without a model"
        )
    cache = side["kv_cache_bytes"]
    yield f"state  {name_of(side)}: {megabytes(side['state_bytes'])}" + (
        f", and KV caches of {megabytes(cache)} for {side['kv_cache_tokens']} tokens"
        if cache
        else ", whatever the length"
    )


def _energy(side: Facts) -> Iterable[str]:
    for test in side["tests"]:
        for source, phases in (test["energy"] or {}).items():
            for phase, found in phases.items():
                rails = ", ".join(f"{rail} {watts:.2f} W" for rail, watts in found["watts"].items())
                per_joule = found["tokens_per_joule"]
                tokens = "" if per_joule is None else f"; {per_joule:.2f} tokens per joule"
                yield f"energy  {phase} @ {test['prompt_tokens']}, {source}: {rails}{tokens}"


def _roofline(side: Facts) -> Iterable[str]:
    found = side["roofline"]
    for name, run in (found["runs"] if found else {}).items():
        yield (
            f"roofline  {name_of(side)} {name} of {run['tokens']}: {run['ms']:.2f} ms; reading "
            f"{megabytes(run['bytes'])} takes {run['bound_ms']:.2f} ms at best "
            f"({run['share_of_bandwidth']:.0%} of the bandwidth measured)"
        )


def _breakdown(side: Facts) -> Iterable[str]:
    for name, cost in side["breakdown"].items():
        total = cost["total_ms"]
        yield f"breakdown  {name_of(side)} {name}: {total:.2f} ms while profiled"
        parts = cost["parts_ms"] or {op: found["ms"] for op, found in cost["ops"].items()}
        for title, spent in (*ranked(parts, SHOWN), ("between operators", cost["between_ms"])):
            yield f"  {spent:9.3f} ms {spent / total:5.0%}  {title}"
        if layers := cost["layers_ms"]:
            yield "  layers: " + ", ".join(f"{n} {spent:.3f}" for n, spent in layers.items())


def _machine(machine: Facts) -> Iterable[str]:
    yield (
        f"machine  {machine['board'] or machine['cpu']}, {machine['usable_cpus']} CPUs, "
        f"{megabytes(machine['memory_bytes'])}; others used {machine['used_by_others']:.0%}"
    )
    after = machine["after"]
    clock, heat = after["clock_mhz"], after["temperature_c"]
    said = {
        "power mode": machine["power_mode"],
        "governor": machine["governor"],
        "clocks": clock and f"{clock['min']:.0f} to {clock['max']:.0f} MHz",
        "temperature": ", ".join(f"{name} {value:.0f} °C" for name, value in heat.items()),
        "throttled": machine["throttled"] is not None and (", ".join(machine["throttled"]) or "no"),
    }
    if shown := ", ".join(f"{name} {value}" for name, value in said.items() if value):
        yield f"conditions  {shown}"
    if gpu := machine["gpu"]:
        yield "GPU  " + ", ".join(f"{name} {value}" for name, value in gpu.items())


def name_of(side: Facts) -> str:
    """A bundle's folder and recipe."""
    return f"{Path(side['bundle']).name} {side['quantization']}"


def plus_minus(spread: Facts | None) -> str:
    """As llama-bench writes it."""
    if spread is None:
        return "absent"
    deviation = spread["deviation"]
    return f"{spread['mean']:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def ms(value: float | None) -> str:
    """Milliseconds with the digits that count."""
    if value is None:
        return "absent"
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"
