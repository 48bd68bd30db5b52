"""Human-readable output of `edge eval`. `--json` has the same figures with more digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edge.apps.measure import plots
from edge.apps.measure.table import FigureTable, named, number

Facts = Mapping[str, Any]
Parts = Iterator[FigureTable | str]
COLOURS = {"weight": "#4477aa", "activation": "#cc6677", "state": "#ddcc77", "all": "#777777"}
_FLOOR = 1e-9  # nats; below this, fp32 resolves nothing


def parts(facts: Facts) -> Parts:
    """Yield the lines and tables for the kind of evaluation in `facts`."""
    kinds: dict[str, Callable[[Facts], Parts]] = {
        "noise": _noise, "tasks": _tasks, "layers": _layers, "sensitivity": _sensitivity,
    }  # fmt: skip
    return next((render for kind, render in kinds.items() if kind in facts), _perplexity)(facts)


def draw(facts: Facts) -> str:
    """Draw one bar per row of the sensitivity table. Raises InputError without matplotlib."""
    rows = [
        (row["name"], max(float(row["kl_nats_per_token"]), _FLOOR), row["kind"])
        for row in facts["sensitivity"]
    ]
    title = f"{facts['quantization']}: what each rounding costs alone"
    return plots.log_bars(
        title, rows, COLOURS, "KL divergence from the floating model, nats a token"
    )


def _perplexity(facts: Facts) -> Parts:
    rows = {
        "perplexity": f"{number(facts['perplexity'])} ± {number(facts['perplexity_error'])} "
        "a token",
        "bits per byte": number(facts["bits_per_byte"]),
        "": f"perplexity {number(facts['byte_perplexity'])} a byte, "
        f"{number(facts['word_perplexity'])} a word",
        "text": _counts(facts),
        "read": _reading(facts),
    }
    if "against" in facts:
        other = facts["against"]
        rows |= {
            "against": f"{other['bundle']}: perplexity {number(other['perplexity'])}, "
            f"{number(other['bits_per_byte'])} bits per byte",
            "ratio": f"perplexity × {facts['perplexity_ratio']:.5f} "
            f"± {facts['perplexity_ratio_error']:.5f}",
            "KL": f"{number(facts['kl_nats_per_token'])} nats a token, "
            f"99 % below {number(facts['kl_p99'])}, at most {number(facts['kl_max'])}",
            "top-1": f"{100 * facts['top1_agreement']:.3f} % agree",
        }
    yield facts["bundle"]
    yield from named(rows)


def _noise(facts: Facts) -> Parts:
    yield facts["bundle"]
    yield from named({
        "clean": f"word perplexity {number(facts['word_perplexity'])}, "
        f"bits per byte {number(facts['bits_per_byte'])}",
        "text": f"{_counts(facts)}, in every other chunk of 100 words",
        "read": _reading(facts),
        "noise": f"in the chunks between, seed {facts['seed']}",
    })  # fmt: skip
    rows = []
    for row in facts["noise"]:
        p = "" if row["probability"] is None else f"{row['probability']:g}"
        degradation = row["degradation"]
        sign = "+" if degradation is not None and degradation >= 0 else ""
        rows.append((row["kind"], p, number(row["word_perplexity"]), sign + number(degradation)))
    yield FigureTable(("noise", "probability", "word perplexity", "degradation"), rows)


def _layers(facts: Facts) -> Parts:
    yield f"{facts['bundle']}: signal to noise"
    yield from named({
        "against": f"{facts['against']['bundle']}, which is the signal",
        "read": f"{_reading(facts)}; at most {facts['max_tokens']:,} tokens",
    })  # fmt: skip
    rows = []
    for row in facts["layers"]:
        decibels = (row["output_snr_db"], row["residual_snr_db"])
        shown = ("∞" if value is None else f"{value:.1f}" for value in decibels)
        rows.append((str(row["index"]), row["kind"], *shown))
    head = ("layer", "kind", "output, dB", "residual after it, dB")
    yield FigureTable(head, rows, words=(0, 1))


def _sensitivity(facts: Facts) -> Parts:
    reference = facts["against"]
    yield f"{facts['bundle']}: what rounding costs"
    yield from named({
        "in": f"{reference['bundle']}: perplexity {number(reference['perplexity'])} a token",
        "text": _counts(reference),
        "read": _reading(facts),
    })  # fmt: skip
    rows = [
        (row["name"], str(row["places"]), f"× {row['perplexity_ratio']:.5f}",
         f"{row['kl_nats_per_token']:.2e}")
        for row in facts["sensitivity"]
    ]  # fmt: skip
    yield FigureTable(("rounded alone", "places", "perplexity", "KL, nats"), rows)


def _tasks(facts: Facts) -> Parts:
    yield facts["bundle"]
    if facts["limit"] is not None:
        yield f"  only the first {facts['limit']} questions of each: not a result to quote"
    rows = []
    for task, values in facts["tasks"].items():
        for key, value in values.items():
            metric, _, suffix = key.partition(",")
            error = values.get(f"{metric}_stderr,{suffix}")
            if suffix and not metric.endswith("_stderr"):
                shown = number(value) + (f" ± {number(error)}" if error is not None else "")
                rows.append((task, metric if suffix == "none" else f"{metric} ({suffix})", shown))
    yield FigureTable(("task", "metric", "value"), rows, words=(0, 1))


def _counts(facts: Facts) -> str:
    """Describe how much was predicted."""
    documents = f"{facts['documents']:,} document{'s' if facts['documents'] != 1 else ''}"
    return (
        f"{documents}: {facts['tokens']:,} tokens predicted, "
        f"{facts['bytes']:,} bytes, {facts['words']:,} words"
    )


def _reading(facts: Facts) -> str:
    """Describe how the text was read."""
    if facts["method"] == "stream":
        return "each document in one stream, the state carried through"
    return (
        f"windows of {facts['window']:,} tokens, moved on by {facts['stride']:,}, "
        "each from an empty state"
    )
