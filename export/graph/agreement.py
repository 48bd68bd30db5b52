"""Check that ONNX Runtime agrees with the reference ops on a whole model with rounded values.

Two engines that sum in a different order differ by 1e-7. Now and then one therefore rounds up where
the other rounds down. One such flip is a sixth of a layer's whole rounding noise at 512 channels,
and every later layer rounds again. After a few layers the two have independent rounding noise of
the same size, though each computes every op correctly, so the model's output says little about
either engine. The reference therefore follows the engine: each rounded value is compared, and then
replaced with the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.config import ModelConfig
from edge.errors import ExportError
from edge.export.graph.model import GRAPH_FILE
from edge.export.graph.run import (
    GraphRunner,
    GraphSession,
    open_reference,
    open_session,
    session_options,
)
from edge.export.graph.verify import THREADS, compare, graph_logits, rounded
from edge.ops import DOMAIN
from edge.plugins.onnx.library import op_of

Tokens = NDArray[np.int64]

# Limits, given the same rounded values: KL in nats a token, share of equal likeliest tokens, and
# share of values rounded differently.
KL, TOP1, FLIPS = 1e-4, 0.995, 1e-4
# Share of the largest value, between floating-point noise and a rounding step.
_TOLERANCE = 1e-3
_FAKE_OPS = ("FakeQuantize", "FakeQuantizeRows")


def rounded_values(model: onnx.ModelProto) -> list[str]:
    """Return the names of the values that nodes of the graph round, except states."""
    names = []
    for node in model.graph.node:
        if node.domain == DOMAIN:
            op = op_of(node.op_type)
            for name, value in zip(node.output, op.outputs, strict=True):
                if value.role == "value" and ("i8" in value.dtypes or op.name in _FAKE_OPS):
                    names.append(name)
    return names


def splits(model: onnx.ModelProto) -> dict[str, tuple[str, str]]:
    """Return the outputs of every SplitQuantizeRows: outliers → (y, scale)."""
    nodes = (n for n in model.graph.node if n.op_type == "SplitQuantizeRows")
    return {node.output[2]: (node.output[0], node.output[1]) for node in nodes}


@dataclass
class _Recorder:
    """A session that records the values of `names` over all its runs."""

    session: GraphSession
    names: Collection[str]
    seen: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    def get_inputs(self) -> Sequence[Any]:
        return self.session.get_inputs()

    def get_outputs(self) -> Sequence[Any]:
        return self.session.get_outputs()

    def run(self, names: list[str], feeds: dict[str, Any]) -> Sequence[Any]:
        all_names = list(dict.fromkeys((*names, *self.names)))
        arrays = self.session.run(all_names, feeds)
        for name, array in zip(all_names, arrays, strict=True):
            if name in self.names:
                self.seen.setdefault(name, []).append(_signed(array))
        return arrays[: len(names)]

    def values(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield each value over all runs, joined along time, the first axis."""
        for name, parts in self.seen.items():
            yield name, np.concatenate(parts)


def _signed(array: NDArray[Any]) -> NDArray[Any]:
    """Convert u8 with zero point 128, as ONNX Runtime holds int8 numbers, to int8."""
    if array.dtype == np.uint8:
        return (array.astype(np.int16) - 128).astype(np.int8)
    return np.array(array)


@dataclass
class Track:
    """Compares the reference's rounded values with the engine's, and continues with the engine's.

    Products with experts round their own input, which cannot be replaced in the reference. With
    `by_row`, all flips in a row of a later value count as one. `left` tells whether any value
    differed from the reference's own. If none did, following has changed nothing.
    """

    engine: dict[str, NDArray[Any]]
    splits: dict[str, tuple[str, str]] = field(default_factory=dict)
    by_row: bool = False
    held: dict[str, Tensor] = field(default_factory=dict)
    values: int = 0
    flips: int = 0
    worst: tuple[int, str] = (0, "")
    left: bool = False

    def __call__(self, name: str, tensor: Tensor) -> Tensor | None:
        engine_value = self.engine.get(name)
        if engine_value is None:
            return None
        if any(name in (outliers, *parts) for outliers, parts in self.splits.items()):
            self.held[name] = tensor
            if name in self.splits:
                self._compare_split(name)
        elif tensor.dtype == torch.int8:
            self._compare_steps(name, np.abs(engine_value.astype(np.int16) - tensor.numpy()))
        else:
            expected = tensor.numpy()
            differs = np.abs(engine_value - expected) > _TOLERANCE * max(
                float(np.abs(expected).max()), 1e-30
            )
            self._count_flips(differs)
        if np.array_equal(engine_value, tensor.numpy()):
            return None
        self.left = True
        return torch.from_numpy(engine_value)

    def _compare_split(self, outliers: str) -> None:
        """Compare a split value. At the threshold only one side may round, which changes the row's
        scale: that is one flip. int8 numbers are compared in the other rows.
        """
        y, _ = self.splits[outliers]
        disagree = (self.engine[outliers] != 0) != (self.held[outliers].numpy() != 0)
        rows = disagree.any(-1)
        steps = np.abs(self.engine[y].astype(np.int16) - self.held[y].numpy())
        self._compare_steps(y, steps[~rows])
        self._count_flips(disagree)
        self.held.clear()

    def _compare_steps(self, name: str, steps: NDArray[Any]) -> None:
        self.worst = max(self.worst, (int(steps.max(initial=0)), name))
        self._count_flips(steps)

    def _count_flips(self, differences: NDArray[Any]) -> None:
        self.values += differences.size
        self.flips += int(np.count_nonzero(differences.any(-1) if self.by_row else differences))


class _Counted:
    """Hook that reports how many values a run has computed, around another one."""

    def __init__(self, report: Callable[[int], None], hook: Track | None = None) -> None:
        self._report = report
        self._hook = hook
        self._done = 0

    def __call__(self, name: str, tensor: Tensor) -> Tensor | None:
        self._done += 1
        self._report(self._done)
        return None if self._hook is None else self._hook(name, tensor)


def verify_engine(
    config: ModelConfig,
    folder: Path,
    tokens: Tokens,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Compare ONNX Runtime with the reference ops on the graph in `folder` and tokens [1, T].

    `flips` is the share of rounded values that differ by one step when both continue from the same
    values. `free_*` are the figures when each continues with its own. `progress` is called with the
    share that is done.

    Raises ExportError when the share exceeds FLIPS or a value differs by more than a step. Also
    when, with the same rounded values, the logits' divergence exceeds KL, or the likeliest token
    differs more often than TOP1 allows, one near-tie aside.
    """
    data = (folder / GRAPH_FILE).read_bytes()
    model = onnx.load_from_string(data)
    split_outputs = splits(model)
    names = [
        *rounded_values(model),
        *split_outputs,
        *(scale for _, scale in split_outputs.values()),
    ]
    outputs = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in outputs)
    session = open_session(folder, model.SerializeToString(), session_options(THREADS))
    recorder = _Recorder(session, frozenset(names))
    engine_logits = graph_logits(
        GraphRunner(recorder, config), tokens, lambda done, total: progress(0.2 * done / total)
    )
    reference = open_reference(folder)
    runner = GraphRunner(reference, config)
    values = sum(len(node.output) for node in model.graph.node)
    by_row = any(node.op_type.startswith("ExpertLinearInt") for node in model.graph.node)
    track = Track(dict(recorder.values()), split_outputs, by_row)
    reference.hook = _Counted(lambda done: progress(0.2 + 0.6 * done / values), track)
    followed_logits, _ = runner.run(tokens, runner.initial(1, tokens.shape[1]))
    free_figures = figures = compare(followed_logits, engine_logits)
    _check_figures(track, figures, tokens.size)
    if track.left:
        reference.hook = _Counted(lambda done: progress(0.8 + 0.2 * done / values))
        free_logits, _ = runner.run(tokens, runner.initial(1, tokens.shape[1]))
        free_figures = compare(free_logits, engine_logits)
    progress(1.0)
    return {
        "reference": "reference ops",
        "tokens": int(tokens.size),
        "flips": float(f"{track.flips / max(1, track.values):.2g}"),
        **rounded(figures),
        "free_kl_nats_per_token": float(f"{free_figures['kl_nats_per_token']:.2g}"),
        "free_top1_agreement": round(free_figures["top1_agreement"], 4),
    }


def _check_figures(track: Track, figures: dict[str, float], count: int) -> None:
    remedy = "please report this model's config.json, the recipe and the processor"
    steps, name = track.worst
    if steps > 1:
        raise ExportError(
            f"ONNX Runtime rounds a value {steps} steps from the reference ops",
            field=name,
            remedy=remedy,
        )
    misses = round((1 - figures["top1_agreement"]) * count)
    divergence = figures["kl_nats_per_token"]
    # in a short text a single near-tie exceeds the allowed share
    too_often = misses > max(1, (1 - TOP1) * count)
    # so does a single flip in a small model
    if divergence > KL or too_often or track.flips > max(1, FLIPS * track.values):
        raise ExportError(
            f"ONNX Runtime differs from the reference ops by {divergence:.1e} nats a token "
            f"({KL:.0e} allowed), prefers another token in {misses} of {count} places, and rounds "
            f"{track.flips} of {track.values} values differently",
            remedy=remedy,
        )
