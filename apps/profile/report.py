"""The JSON object of a measurement. The table and the page are made from it and the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge.apps.measure.machine import (
    BUSY,
    governor,
    installed,
    machine,
    power_mode,
    stamp,
    throttled,
)
from edge.apps.measure.power import PERIOD, why_none
from edge.apps.measure.roofline import bound_s, work
from edge.apps.measure.statistics import ratio, spread
from edge.apps.profile import draft_report
from edge.apps.profile.answers import Sample
from edge.apps.profile.run import OTHER, THIS, ProfileResult, ProfileSide, memory_of
from edge.bundle import open_bundle
from edge.runtime import ort_providers
from edge.runtime.model import resolve

Facts = dict[str, Any]
_COMPARED_FIGURES: dict[str, Callable[[Sample], float | None]] = {
    "ttft": lambda sample: sample.ttft,
    "tpot": lambda sample: sample.tpot,
    "ttlt": lambda sample: sample.ttlt,
}


DEFINITIONS = {
    "TTFT": "time to first token: from the request, already tokenized, until the first token is "
    "sampled; mean over repetitions",
    "TPOT": "time per output token after the first: (TTLT - TTFT) / (n - 1); mean over repetitions",
    "ITL": "inter-token latency: every gap between two tokens, pooled over repetitions; "
    "percentiles interpolated linearly",
    "TTLT": "time to last token: from the request until the last token is sampled; mean",
    "prefill": "prompt tokens per second until the prompt is consumed, before the first token is "
    "sampled; mean ± sample standard deviation over repetitions",
    "decode": "tokens per second after the first, 1 / TPOT; mean ± sample standard deviation",
    "context": "one step and one sampled token at this context length",
    "peak memory": "peak resident bytes since before the bundle was loaded (VmHWM), including the "
    "program; anonymous and file-backed parts as they were after the longest prompt",
    "state": "one recurrent state, independent of the length of the text; KV caches are separate",
    "ratio": "this ÷ the other, slower above 1: geometric mean of the ratios within each "
    "repetition, with a 95 % interval by Student's t on their logarithms",
    "breakdown": "from the engine's profiler, the fastest of several runs; it slows a run down, so "
    "trust shares, not sums",
    "roofline": "bytes of the weights read once and of the state read and written, ÷ the best "
    "bandwidth measured by reading or copying a buffer far larger than the cache",
    "drafting": "answers to real prompts with and without drafts, in turn; timed after the first "
    "token, so only the drafter's reading of the prompt counts; acceptance length: tokens per "
    "verify run, including the target's own",
    "energy": "from energy counters, or rails read every 50 ms; tokens per joule over decode, "
    "including the machine's idle power",
}

INSIDE = {
    "tokenization": False,
    "sampling": True,
    "detokenization": False,
    "prompt": "random token ids, seed 0; end tokens are ignored",
}


def inside(temperature: float) -> str:
    """Return one line that says what the times include."""
    sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return (
        f"sampling ({sampling}) is included in the times; tokenization and detokenization are not; "
        "prompts are random token ids, and end tokens are ignored"
    )


def to_dict(result: ProfileResult) -> Facts:
    """Return the object that `--json` prints.

    `ttft_ms tpot_ms itl_ms ttlt_ms prefill_tokens_per_s decode_tokens_per_s peak_memory_bytes
    state_bytes` are a stable interface, for the first prompt length; `tests` has every length.
    Unavailable figures are null, with a reason in `absent`.
    """
    absent: dict[str, str] = {}
    facts = _side(result, result.sides[THIS], absent)
    facts |= _settings(result)
    facts["machine"] = _machine(result, absent)
    if other := result.sides.get(OTHER):
        facts["against"] = _side(result, other, absent)
        facts["ratio"] = _ratios(result, absent)
    _name_sides(facts, facts.get("against"))
    if result.drafted:
        facts["speculation"] = draft_report.to_dict(result.drafted, absent)
    facts["warnings"], facts["notes"] = list(_warnings(result)), result.notes
    facts["absent"] = absent
    facts["definitions"] = DEFINITIONS
    return facts


def lines(result: ProfileResult) -> Iterator[Facts]:
    """Yield one object per repetition, prompt length and side, for `--jsonl`."""
    for side in result.sides.values():
        for prompt, samples in zip(result.plan.prompts, side.samples, strict=True):
            for number, sample in enumerate(samples):
                yield {
                    "bundle": side.facts["bundle"],
                    "engine": side.facts["engine"],
                    "provider": side.facts["provider"],
                    "threads": side.facts["threads"],
                    "prompt_tokens": len(prompt),
                    "generated_tokens": result.plan.generated,
                    "repetition": number,
                    **sample.to_dict(),
                }


def _name_sides(facts: Facts, other: Facts | None) -> None:
    """Name the sides by folder and recipe, and by backend as well if those are equal."""
    sides = [facts] if other is None else [facts, other]
    for side in sides:
        side["name"] = f"{Path(side['bundle']).name} {side['quantization']}"
    if other and facts["name"] == other["name"]:
        for side in sides:
            side["name"] += f" {backend(side)}"


# -- one side -------------------------------------------------------------------------------------


def _side(result: ProfileResult, side: ProfileSide, absent: dict[str, str]) -> Facts:
    tests = [_test(result, samples, absent) for samples in side.samples]
    first = tests[0]
    if side.facts["peak_memory_bytes"] is None:
        absent["peak_memory_bytes"] = "/proc/self/status has no VmHWM"
    elif not side.facts["memory"]["peak_restarted"]:
        absent["peak of this bundle alone"] = "VmHWM cannot be reset: it covers the whole program"
    if not side.depths:
        absent["contexts"] = "--context 0, or no depth fits"
    return {
        **side.facts,
        **{name: first[name]["mean"] if first[name] else None for name in (
            "ttft_ms", "tpot_ms", "ttlt_ms", "prefill_tokens_per_s", "decode_tokens_per_s")},
        "itl_ms": first["itl_ms"],
        "tests": tests,
        "contexts": [
            {
                "context": depth.context,
                "prefill_ms": 1e3 * depth.prefill_s,
                "step_ms": _spread([1e3 * step for step in depth.step_s]),
            }
            for depth in side.depths
        ],
        "breakdown": _breakdown(result, side, absent),
        "roofline": _roofline(result, side, absent),
    }  # fmt: skip


def _test(result: ProfileResult, samples: Sequence[Sample], absent: dict[str, str]) -> Facts:
    """Return all figures of one prompt length."""
    if samples and samples[0].tpot is None:
        absent["tpot_ms"] = absent["itl_ms"] = "needs at least two generated tokens (-n 2 or more)"
    rows = [sample.to_dict() for sample in samples]
    spreads = {
        name: _spread([row[name] for row in rows if row[name] is not None])
        for name in ("ttft_ms", "tpot_ms", "ttlt_ms", "prefill_ms", "sampling_ms",
                     "prefill_tokens_per_s", "decode_tokens_per_s")
    }  # fmt: skip
    return {
        "prompt_tokens": samples[0].prompt,
        "generated_tokens": result.plan.generated,
        **spreads,
        "itl_ms": _spread([gap for row in rows for gap in row["itl_ms"]]),
        "energy": _energy(result, samples, absent),
    }


def _spread(values: Sequence[float]) -> Facts | None:
    summary = spread(values)
    return asdict(summary) if summary else None


def _energy(
    result: ProfileResult, samples: Sequence[Sample], absent: dict[str, str]
) -> Facts | None:
    """Return the watts of each rail over prefill and decode, joules and tokens per joule."""
    windows = {
        "prefill": [(s.began, s.began + s.prompt_s) for s in samples],
        "decode": [(s.began + s.ttft, s.began + s.ttlt) for s in samples],
    }
    tokens = {
        "prefill": sum(s.prompt for s in samples),
        "decode": sum(len(s.gaps) for s in samples),
    }
    if not result.logs:
        absent["energy"] = why_none()
        return None
    energy: Facts = {}
    for source, log in result.logs:
        for phase, spans in windows.items():
            seconds = sum(end - begin for begin, end in spans)
            rails = {rail: log.joules(rail, spans) for rail in log.readings}
            known = {rail: joules for rail, joules in rails.items() if joules is not None}
            if not known or seconds <= 0:
                absent[f"energy of {phase}, {source.name}"] = (
                    f"{1e3 * seconds:.0f} ms in {len(spans)} turns are too short "
                    f"for readings every {1e3 * PERIOD:.0f} ms"
                )
                continue
            whole = [known[rail] for rail in source.whole if rail in known]
            joules = sum(whole)
            energy.setdefault(source.name, {})[phase] = {
                "watts": {rail: value / seconds for rail, value in known.items()},
                "joules": joules if whole else None,
                "tokens_per_joule": tokens[phase] / joules if joules > 0 else None,
            }
    return energy or None


def _breakdown(result: ProfileResult, side: ProfileSide, absent: dict[str, str]) -> Facts:
    if not side.costs:
        absent["breakdown"] = (
            "turned off by --no-breakdown"
            if not result.request.explain
            else f"no profiler for engine {backend(side.facts)}"
        )
    for name, cost in side.costs.items():
        if not cost.layers:
            absent[f"layers of {name}"] = "the profile does not match the optimized graph"
    return {name: cost.to_dict() for name, cost in side.costs.items()}


def _roofline(result: ProfileResult, side: ProfileSide, absent: dict[str, str]) -> Facts | None:
    """Return bytes, operations, time and the bound on time, of a step and of a prefill chunk.

    The time of a chunk is its share of the longest prompt's.
    """
    roof = result.roofs.get(memory_of(side.facts) or "")
    if roof is None:
        absent["roofline"] = (
            "not measured for this provider of ONNX Runtime"
            if memory_of(side.facts) is None
            else "turned off by --no-breakdown"
        )
        return None
    if roof.flops is None:
        absent["arithmetic"] = "measured only on a CPU, with one thread per core"
    facts: Facts = {"roof": roof.to_dict(), "runs": {}}
    prompt = max(side.samples, key=lambda samples: samples[0].prompt)
    tokens = min(prompt[0].prompt, side.facts["chunk"])
    share = tokens / prompt[0].prompt
    steps = [s.tpot for samples in side.samples for s in samples if s.tpot is not None]
    times = {"decode": (1, steps), "prefill": (tokens, [share * s.prompt_s for s in prompt])}
    with open_bundle(resolve(side.facts["bundle"])) as opened:
        config = opened.manifest.model
    for name, (count, durations) in times.items():
        if not durations:
            continue
        demand = work(config, side.facts["weight_bytes"], side.facts["state_bytes"], count)
        seconds = sorted(durations)[len(durations) // 2]
        facts["runs"][name] = {
            "tokens": count,
            "bytes": demand.bytes,
            "flops": demand.flops,
            "flops_per_byte": demand.intensity,
            "ms": 1e3 * seconds,
            "bound_ms": 1e3 * bound_s(demand, roof),
            "share_of_bandwidth": bound_s(demand, roof) / seconds,
            "flops_per_s": demand.flops / seconds,
        }
    return facts


# -- all together ---------------------------------------------------------------------------------


def _settings(result: ProfileResult) -> Facts:
    plan = result.plan
    # distributions that provide ONNX Runtime
    packages = ["mamba-edge", "numpy", *(ort_providers.packages() or ["onnxruntime"])]
    return {
        "date": stamp(),
        "prompt_tokens": [len(prompt) for prompt in plan.prompts],
        "generated_tokens": plan.generated,
        "repetitions": plan.repetitions,
        "warmup": plan.warmup,
        "temperature": result.request.temperature,
        "inside": INSIDE,
        "versions": {name: installed(name) for name in packages},
    }


def _machine(result: ProfileResult, absent: dict[str, str]) -> Facts:
    limited = throttled(result.before, result.after)
    facts = machine() | {
        "governor": governor(),
        "power_mode": power_mode(),
        "before": result.before.to_dict(),
        "after": result.after.to_dict(),
        "throttled": limited,
        "used_by_others": result.others,
        "trustworthy": result.others <= BUSY,
        "gpu": result.gpu.facts() if result.gpu else None,
    }
    reasons = {
        "governor": (facts["governor"] is None, "no cpufreq in /sys"),
        "power_mode": (facts["power_mode"] is None, "no nvpmodel, no platform profile"),
        "clock": (not result.after.clocks_mhz, "neither in cpufreq nor in /proc/cpuinfo"),
        "temperature": (not result.after.temperatures_c, "no thermal zones, no sensors"),
        "throttling": (limited is None, "no counter on this machine"),
        "gpu": (result.gpu is None, "no NVIDIA driver"),
    }
    absent |= {name: reason for name, (missing, reason) in reasons.items() if missing}
    return facts


def _ratios(result: ProfileResult, absent: dict[str, str]) -> list[Facts]:
    """Return this ÷ the other, for each prompt length."""
    rows = []
    pairs = zip(result.sides[THIS].samples, result.sides[OTHER].samples, strict=True)
    for ours, theirs in pairs:
        row: Facts = {"prompt_tokens": ours[0].prompt}
        for name, figure in _COMPARED_FIGURES.items():
            a, b = _known_values(ours, figure), _known_values(theirs, figure)
            row[name] = asdict(ratio(a, b)) if a and b else None
        rows.append(row)
    if result.plan.repetitions < 2:
        absent["interval of the ratio"] = "needs at least two repetitions (-r 2 or more)"
    return rows


def _known_values(
    samples: Sequence[Sample], figure: Callable[[Sample], float | None]
) -> list[float]:
    return [value for sample in samples if (value := figure(sample)) is not None]


def _warnings(result: ProfileResult) -> Iterator[str]:
    if result.others > BUSY:
        yield (
            f"other programs used {result.others:.0%} of the processor during the measurement: "
            "do not trust the times"
        )
    if limited := throttled(result.before, result.after):
        yield f"the machine was throttled: {', '.join(limited)}"
    if result.gpu and (reasons := result.gpu.facts()["throttled"]):
        yield f"the GPU was throttled: {', '.join(reasons)}"


def backend(side: Mapping[str, Any]) -> str:
    """Return the engine, followed by its provider if it has providers."""
    return " ".join(part for part in (side["engine"], side["provider"]) if part)
