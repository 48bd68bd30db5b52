"""Run text through the fp32 graph once and collect statistics of the values to be rounded."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.config import ModelConfig
from edge.errors import ExportError
from edge.export.calibration.texts import CalibrationText
from edge.export.graph.model import GRAPH_FILE
from edge.export.graph.run import GraphRunner, GraphState, states_after
from edge.export.mixers import mixer_of
from edge.export.quantize.observers import Calibration, ExpertHessians, Hessian, Routes, Statistics
from edge.export.training_ops import selective_scan_heads_chunked
from edge.plugins.hadamard.matrices import factors
from edge.plugins.hadamard.reference import hadamard
from edge.plugins.reference.graph import Hook, ReferenceGraph
from edge.plugins.selective_scan.reference import Scan
from edge.plugins.selective_scan_heads.reference import (
    selective_scan_heads,
    selective_scan_heads_node,
)

Progress = Callable[[int, int], None]
Observer = Statistics | Hessian | ExpertHessians | Routes
_T = TypeVar("_T")
Tokens = NDArray[np.int64]

# Tokens per run that emits the state after each token: 64 states per layer are in memory at once.
_STATE_RUN = 64
_CHUNK = 32


def calibration_graph(folder: str | Path) -> ReferenceGraph:
    """Open the fp32 graph in `folder`, with the parallel form of Mamba-2's scan for speed."""
    ops = {"SelectiveScanHeads": partial(selective_scan_heads_node, scan=_scan_heads)}
    return ReferenceGraph((Path(folder) / GRAPH_FILE).read_bytes(), folder, ops=ops)


def _scan_heads(**inputs: Any) -> tuple[Tensor, Tensor]:
    parallel: Scan = partial(selective_scan_heads_chunked, chunk=_CHUNK)
    scan = selective_scan_heads if inputs["x"].shape[1] < _CHUNK else parallel
    return scan(**inputs)


def calibrate(
    graph: ReferenceGraph,
    config: ModelConfig,
    text: CalibrationText,
    wanted: Collection[str],
    rotated: Collection[str] = (),
    progress: Progress | None = None,
) -> Calibration:
    """Return statistics of the values `wanted`, and of the rotations of `rotated`, over all tokens.

    Values are named as in the graph (`layers.0.conv`). `ssm_states` are observed after every token,
    with a maximum per state (Mamba-1: [N]) or per head and state (Mamba-2: [H, N]).
    `progress(done, total)` counts sequences.

    Every sequence runs alone, from an empty state. The rounding of a product depends on its number
    of rows, so a sequence run together with others would give different statistics. The result does
    not depend on the order or the grouping of sequences.

    Raises ExportError for a value that no node yields, and for a NaN or infinity, naming the first
    layer and value that has one.
    """

    def empty() -> tuple[dict[str, Statistics], dict[str, Statistics]]:
        values = {name: Statistics(name, _axes(config, name)) for name in wanted}
        return values, {name: Statistics(f"{name}, rotated") for name in rotated}

    def observe(row: Tokens) -> tuple[dict[str, Statistics], dict[str, Statistics]]:
        statistics = empty()
        _observe_sequence(graph, config, row, *statistics)
        return statistics

    totals = empty()
    with _in_parallel(observe, text.sequences) as results:
        for done, result in enumerate(results):
            for total, part in zip(totals, result, strict=True):
                for name, statistics in part.items():
                    total[name].merge(statistics)
            _report_progress(progress, done + 1, text)
    return Calibration(*totals, text.record())


def hessians(
    graph: ReferenceGraph,
    config: ModelConfig,
    text: CalibrationText,
    wanted: Collection[str],
    rotated: Collection[str] = (),
    routed: Mapping[str, tuple[str, Routes]] = MappingProxyType({}),
    progress: Progress | None = None,
) -> tuple[dict[str, Hessian | ExpertHessians], dict[str, Hessian]]:
    """Return Xᵀ·X of the values `wanted` and of the rotations of `rotated`, by name.

    `routed` maps a value to the value that routes its slots, and Routes: its Xᵀ·X is per expert.
    Each matrix is K² numbers of 8 bytes, so request a few layers at a time. Sequences are sorted by
    their tokens, so that the floating-point sums do not depend on the given order.

    Raises ExportError as `calibrate` does.
    """
    values: dict[str, Hessian | ExpertHessians] = {name: Hessian(name) for name in wanted}
    values |= {name: ExpertHessians(name, routes) for name, (_, routes) in routed.items()}
    rotations = {name: Hessian(f"{name}, rotated") for name in rotated}
    with _one_thread():
        for done, row in enumerate(text.sequences[np.lexsort(text.sequences.T[::-1])]):
            _observe_sequence(graph, config, row, {**values, **dict(routed.values())}, rotations)
            _report_progress(progress, done + 1, text)
    return values, rotations


def _axes(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the axes that keep separate maxima: channels, or a state's axes with scales."""
    if not name.endswith(".ssm_states"):
        return (-1,)
    return mixer_of(config.layers[int(name.split(".")[1])]).state_axes


def _report_progress(progress: Progress | None, done: int, text: CalibrationText) -> None:
    if progress is not None:
        progress(done, len(text.sequences))


def _observe_sequence(
    graph: ReferenceGraph,
    config: ModelConfig,
    row: Tokens,
    values: Mapping[str, Observer],
    rotations: Mapping[str, Observer],
) -> None:
    """Run one sequence [L] through the part of the graph that the watched values need."""

    def observe(name: str, x: Tensor) -> None:
        if name in values:
            values[name].observe(x)
        if name in rotations:
            slow, fast = (torch.from_numpy(part.copy()) for part in factors(x.shape[-1]))
            rotations[name].observe(hadamard(x, slow, fast))

    watched = {*values, *rotations}
    try:
        _run_sequence(graph, config, row[None], watched, observe)
    except ExportError:
        # Not every value is watched: run again and report where the NaN or infinity began.
        _run_sequence(graph, config, row[None], watched, _require_finite)
        raise


def _run_sequence(
    graph: ReferenceGraph, config: ModelConfig, tokens: Tokens, watched: set[str], hook: Hook
) -> None:
    runner = GraphRunner(graph, config)
    every_state = any(name.endswith(".ssm_states") for name in watched)
    length = tokens.shape[1]
    run_length = _STATE_RUN if every_state else length
    state = runner.initial(1, length)
    for start in range(0, length, run_length):
        chunk = tokens[:, start : start + run_length]
        steps = chunk.shape[1]
        feeds = runner.feeds(chunk, state, kept=range(steps) if every_state else None)
        state_outputs = [port.name for port in graph.get_outputs() if port.name != "logits"]
        out = graph.watch(hook, watched, feeds, state_outputs if start + steps < length else ())
        state = GraphState(states_after(out, steps - 1 if every_state else 0), start + steps)


def _require_finite(name: str, x: Tensor) -> None:
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        Statistics(name).observe(x)


@contextmanager
def _in_parallel(work: Callable[[Tokens], _T], rows: Tokens) -> Iterator[Iterator[_T]]:
    """Run `work` on each row with one thread per core; results come in order.

    Leaving the context drops rows whose work has not begun.
    """
    with _one_thread():
        pool = ThreadPoolExecutor(os.cpu_count() or 1)
        try:
            yield pool.map(work, rows)
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread per op: the number of threads changes sums. When other programs run, two
    threads that wait for each other at every op take ten times as long as one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
