"""Figures as aligned lines for people. `--json` has the same and more digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def describe(facts: Mapping[str, Any]) -> str:
    """What `edge eval BUNDLE TEXT` found, with or without another bundle."""
    rows = {
        "perplexity": f"{number(facts['perplexity'])} ± {number(facts['perplexity_error'])} "
        "a token",
        "bits per byte": number(facts["bits_per_byte"]),
        "": f"perplexity {number(facts['byte_perplexity'])} a byte, "
        f"{number(facts['word_perplexity'])} a word",
        "text": counts(facts),
        "read": reading(facts),
    }
    if "against" in facts:
        rows |= _against(facts)
    return "\n".join([facts["bundle"], *lines(rows)])


def _against(facts: Mapping[str, Any]) -> dict[str, str]:
    other = facts["against"]
    return {
        "against": f"{other['bundle']}: perplexity {number(other['perplexity'])}, "
        f"{number(other['bits_per_byte'])} bits per byte",
        "ratio": f"perplexity × {facts['perplexity_ratio']:.5f} "
        f"± {facts['perplexity_ratio_error']:.5f}",
        "KL": f"{number(facts['kl_nats_per_token'])} nats a token, "
        f"99 % below {number(facts['kl_p99'])}, at most {number(facts['kl_max'])}",
        "top-1": f"{100 * facts['top1_agreement']:.3f} % agree",
    }


def describe_noise(facts: Mapping[str, Any]) -> str:
    """What `--noise` found, as a table."""
    clean = facts["word_perplexity"]
    rows = {
        "clean": f"word perplexity {number(clean)}, bits per byte {number(facts['bits_per_byte'])}",
        "text": f"{counts(facts)}, in every other chunk of 100 words",
        "read": reading(facts),
        "noise": f"in the chunks between, seed {facts['seed']}",
    }
    table = ["", f"  {'noise':<12}{'probability':>12}{'word perplexity':>18}{'degradation':>15}"]
    for row in facts["noise"]:
        p = "" if row["probability"] is None else f"{row['probability']:g}"
        worse = row["degradation"]
        sign = "+" if worse is not None and worse >= 0 else ""
        table.append(
            f"  {row['kind']:<12}{p:>12}{number(row['word_perplexity']):>18}"
            f"{sign + number(worse):>15}"
        )
    return "\n".join([facts["bundle"], *lines(rows), *table])


def describe_layers(facts: Mapping[str, Any]) -> str:
    """What `--layers` found, as a table."""
    rows = {
        "against": f"{facts['against']['bundle']}, which is the signal",
        "read": f"{reading(facts)}; at most {facts['max_tokens']:,} tokens",
    }
    table = ["", f"  {'layer':<8}{'kind':<12}{'output, dB':>12}{'residual after it, dB':>24}"]
    for row in facts["layers"]:
        output, residual = (
            "∞" if row[key] is None else f"{row[key]:.1f}"
            for key in ("output_snr_db", "residual_snr_db")
        )
        table.append(f"  {row['index']:<8}{row['kind']:<12}{output:>12}{residual:>24}")
    return "\n".join([f"{facts['bundle']}: signal to noise", *lines(rows), *table])


def describe_sensitivity(facts: Mapping[str, Any]) -> str:
    """What `--sensitivity` found, as a table, worst first."""
    plain = facts["against"]
    rows = {
        "in": f"{plain['bundle']}: perplexity {number(plain['perplexity'])} a token",
        "text": counts(plain),
        "read": reading(facts),
    }
    table = ["", f"  {'rounded alone':<44}{'places':>7}{'perplexity':>13}{'KL, nats':>12}"]
    for row in facts["sensitivity"]:
        table.append(
            f"  {row['name']:<44}{row['places']:>7}{'×':>4}{row['perplexity_ratio']:>9.5f}"
            f"{row['kl_nats_per_token']:>12.2e}"
        )
    return "\n".join([f"{facts['bundle']}: what rounding costs", *lines(rows), *table])


def describe_tasks(facts: Mapping[str, Any]) -> str:
    """What `--tasks` found, a metric a line."""
    out = [facts["bundle"]]
    if facts["limit"] is not None:
        out.append(f"  only the first {facts['limit']} questions of each: not a result to quote")
    for task, values in facts["tasks"].items():
        for key, value in values.items():
            metric, _, how = key.partition(",")
            error = values.get(f"{metric}_stderr,{how}")
            if how and not metric.endswith("_stderr"):
                shown = number(value) + (f" ± {number(error)}" if error is not None else "")
                name = metric if how == "none" else f"{metric} ({how})"
                out.append(f"  {task:<28}{name:<24}{shown}")
    return "\n".join(out)


def counts(facts: Mapping[str, Any]) -> str:
    """How much was predicted."""
    documents = f"{facts['documents']:,} document{'s' if facts['documents'] != 1 else ''}"
    return (
        f"{documents}: {facts['tokens']:,} tokens predicted, "
        f"{facts['bytes']:,} bytes, {facts['words']:,} words"
    )


def reading(facts: Mapping[str, Any]) -> str:
    """How the text was read."""
    if facts["method"] == "stream":
        return "each document in one stream, the state carried through"
    return (
        f"windows of {facts['window']:,} tokens, moved on by {facts['stride']:,}, "
        "each from an empty state"
    )


def lines(rows: Mapping[str, str]) -> list[str]:
    """Names and values under each other."""
    width = max(map(len, rows)) + 2
    return [f"  {name:<{width}}{value}" for name, value in rows.items()]


def number(value: float | None) -> str:
    """Four digits that count; None is what no number can say."""
    if value is None:
        return "∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 3 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}"
    return f"{value:.2e}"
