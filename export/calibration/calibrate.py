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


def _scan_heads(**given: Any) -> tuple[Tensor, Tensor]:
    parallel: Scan = partial(selective_scan_heads_chunked, chunk=_CHUNK)
    scan = selective_scan_heads if given["x"].shape[1] < _CHUNK else parallel
    return scan(**given)


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

    def nothing() -> tuple[dict[str, Statistics], dict[str, Statistics]]:
        values = {name: Statistics(name, _axes(config, name)) for name in wanted}
        return values, {name: Statistics(f"{name}, rotated") for name in rotated}

    def seen(row: Tokens) -> tuple[dict[str, Statistics], dict[str, Statistics]]:
        found = nothing()
        _watch(graph, config, row, *found)
        return found

    every = nothing()
    with _in_parallel(seen, text.sequences) as parts:
        for done, found in enumerate(parts):
            for total, part in zip(every, found, strict=True):
                for name, statistics in part.items():
                    total[name].merge(statistics)
            _tell(progress, done + 1, text)
    return Calibration(*every, text.record())


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
    turned = {name: Hessian(f"{name}, rotated") for name in rotated}
    with _one_thread():
        for done, row in enumerate(text.sequences[np.lexsort(text.sequences.T[::-1])]):
            _watch(graph, config, row, {**values, **dict(routed.values())}, turned)
            _tell(progress, done + 1, text)
    return values, turned


def _axes(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the axes that keep separate maxima: channels, or a state's axes with scales."""
    if not name.endswith(".ssm_states"):
        return (-1,)
    return mixer_of(config.layers[int(name.split(".")[1])]).state_axes


def _tell(progress: Progress | None, done: int, text: CalibrationText) -> None:
    if progress is not None:
        progress(done, len(text.sequences))


def _watch(
    graph: ReferenceGraph,
    config: ModelConfig,
    row: Tokens,
    values: Mapping[str, Observer],
    turned: Mapping[str, Observer],
) -> None:
    """Run one sequence [L] through the part of the graph that the watched values need."""

    def look(name: str, x: Tensor) -> None:
        if name in values:
            values[name].observe(x)
        if name in turned:
            slow, fast = (torch.from_numpy(part.copy()) for part in factors(x.shape[-1]))
            turned[name].observe(hadamard(x, slow, fast))

    watched = {*values, *turned}
    try:
        _sequence(graph, config, row[None], watched, look)
    except ExportError:
        # Not every value is watched: run again and report where the NaN or infinity began.
        _sequence(graph, config, row[None], watched, _require_finite)
        raise


def _sequence(
    graph: ReferenceGraph, config: ModelConfig, tokens: Tokens, watched: set[str], hook: Hook
) -> None:
    runner = GraphRunner(graph, config)
    every = any(name.endswith(".ssm_states") for name in watched)
    length = tokens.shape[1]
    run = _STATE_RUN if every else length
    state = runner.initial(1, length)
    for start in range(0, length, run):
        part = tokens[:, start : start + run]
        steps = part.shape[1]
        feeds = runner.feeds(part, state, kept=range(steps) if every else None)
        after = [port.name for port in graph.get_outputs() if port.name != "logits"]
        out = graph.watch(hook, watched, feeds, after if start + steps < length else ())
        state = GraphState(states_after(out, steps - 1 if every else 0), start + steps)


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
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
