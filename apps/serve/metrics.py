"""Metrics of a server, in Prometheus' text format (prometheus.io, Exposition formats, 0.0.4)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge.runtime.result import GenerationResult

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_HELP = {
    "edge_requests_total": "Requests by route and status.",
    "edge_answers_total": "Answers by finish reason.",
    "edge_prompt_tokens_total": "Prompt tokens.",
    "edge_reused_tokens_total": "Prompt tokens that were not run again.",
    "edge_embedded_tokens_total": "Tokens of texts that were embedded.",
    "edge_generated_tokens_total": "Tokens that were sampled.",
    "edge_verify_runs_total": "Runs that verified a draft.",
    "edge_drafted_tokens_total": "Tokens that were drafted.",
    "edge_accepted_tokens_total": "Drafted tokens that were accepted.",
    "edge_ttft_seconds": "Time from a request's arrival to its first token, waiting included.",
    "edge_tpot_seconds": "Mean time per token of an answer after its first token.",
    "edge_requests_inside": "Requests being read, waiting or being answered.",
    "edge_requests_waiting": "Requests that wait for the model.",
    "edge_requests_running": "Requests being answered.",
    "edge_batch_size": "Conversations in the last joined step.",
    "edge_state_bytes": "Memory of the running states.",
    "edge_kept_state_bytes": "Memory of the states kept for later prompts.",
    "edge_reader_stuck": "1 while reading a prompt takes longer than any prompt should.",
    "edge_temperature_celsius": "Temperature by sensor.",
}
Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Mapping[str, str], float]


class Histogram:
    """Counts of observations up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, name: str) -> Iterable[Sample]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f"{name}_bucket", {"le": str(bound)}, total
        yield f"{name}_sum", {}, self._sum
        yield f"{name}_count", {}, total


class Metrics:
    """Counts since the server started. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._histograms = {"edge_ttft_seconds": Histogram(), "edge_tpot_seconds": Histogram()}

    def requested(self, route: str, status: int) -> None:
        """Count a request that was answered or refused."""
        with self._lock:
            labels = (("route", route), ("status", str(status)))
            self._counts["edge_requests_total", labels] += 1

    def answered(
        self, prompt: int, reused: int, waited_s: float, results: Sequence[GenerationResult]
    ) -> None:
        """Count a request's answers. `waited_s`: from its arrival until the model began."""
        with self._lock:
            self._add("edge_prompt_tokens_total", prompt)
            self._add("edge_reused_tokens_total", reused)
            for index, result in enumerate(results):
                self._counts["edge_answers_total", (("reason", result.finish_reason),)] += 1
                self._add("edge_generated_tokens_total", len(result.tokens))
                if (drafted := result.speculation) is not None:
                    self._add("edge_verify_runs_total", drafted.rounds)
                    self._add("edge_drafted_tokens_total", drafted.drafted)
                    self._add("edge_accepted_tokens_total", drafted.accepted)
                times = result.timings
                if index == 0 and times.ttft_s is not None:
                    self._histograms["edge_ttft_seconds"].observe(waited_s + times.ttft_s)
                if times.tokens_per_s:
                    self._histograms["edge_tpot_seconds"].observe(1 / times.tokens_per_s)

    def embedded(self, tokens: int) -> None:
        """Count the tokens of an embeddings request."""
        with self._lock:
            self._add("edge_embedded_tokens_total", tokens)

    def text(self, gauges: Iterable[Sample]) -> str:
        """Return all metrics as text. `gauges`: current values."""
        with self._lock:
            counts = [(name, dict(labels), n) for (name, labels), n in self._counts.items()]
            by_kind: dict[str, list[Sample]] = {
                "counter": sorted(counts, key=str),
                "histogram": [s for n, h in self._histograms.items() for s in h.samples(n)],
                "gauge": list(gauges),
            }
        lines: list[str] = []
        described: set[str] = set()
        for kind, samples in by_kind.items():
            for name, labels, value in samples:
                family = name if name in _HELP else name.rpartition("_")[0]
                if family not in described:
                    described.add(family)
                    lines += [f"# HELP {family} {_HELP[family]}", f"# TYPE {family} {kind}"]
                lines.append(f"{name}{_format_labels(labels)} {value:.17g}")
        return "\n".join(lines) + "\n"

    def _add(self, name: str, count: int) -> None:
        self._counts[name, ()] += count


def _format_labels(labels: Mapping[str, Any]) -> str:
    if not labels:
        return ""
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return "{" + ",".join(f'{k}="{str(v).translate(escapes)}"' for k, v in labels.items()) + "}"
