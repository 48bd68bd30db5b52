"""Make a plan from a checkpoint and a user's choices: build the fp32 graph and run text over it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError
from edge.export.calibration.calibrate import calibrate, calibration_graph
from edge.export.calibration.hessians import HessianSource
from edge.export.calibration.texts import (
    LENGTH,
    SEQUENCES,
    CalibrationText,
    checkpoint_reader,
    read_text,
)
from edge.export.checkpoint import Checkpoint
from edge.export.graph import build_graph
from edge.export.nodes.builder import to_numpy
from edge.export.quantize.observers import Calibration
from edge.export.quantize.plan import ModelPlan
from edge.export.recipes import Mixture, plan_model

Tokens = NDArray[np.int64]
# Called with a stage and the share of the whole export that is done.
Progress = Callable[[str, float], None]
# Tokens held out from calibration for judging, if the text has at least four times as many.
HELD_OUT = 1024


@dataclass(frozen=True)
class TextChoice:
    """Text to calibrate on; `path` None is the greetings of the demonstration models."""

    path: Path | None = None
    sequences: int = SEQUENCES
    length: int = LENGTH


@dataclass(frozen=True)
class PreparedPlan:
    """A plan and the calibration behind it.

    Attributes:
        text: text calibrated on.
        held_out: i64 [S, L], tokens of the same file that were held out.
        hessian: source of Hessians for GPTQ, valid while the fp32 graph exists.
    """

    plan: ModelPlan
    text: CalibrationText | None = None
    held_out: Tokens | None = None
    hessian: HessianSource | None = None


@contextmanager
def prepare(
    source: Checkpoint,
    mixed: Mixture,
    given: TextChoice | None,
    tokenizer: Path | None,
    room: Path,
    report: Progress,
) -> Iterator[PreparedPlan]:
    """Make the plan, calibrated if the recipe needs it. It is valid inside the context.

    The fp32 graph is built in a temporary folder inside `room`, so that a killed export leaves
    nothing behind.
    """
    config, observations = source.config, mixed.observations()
    gptq = mixed.four_bits and (given is not None or bool(observations))
    if not observations and not gptq:
        if given is not None:
            raise ExportError(
                f"recipe {mixed.name} does not calibrate",
                field="calibrate",
                remedy="leave the calibration options out",
            )
        yield PreparedPlan(plan_model(config, mixed, fetch=_fetcher(source)))
        return
    text, held_out = _read_texts(source, given or TextChoice(), tokenizer)
    with tempfile.TemporaryDirectory(prefix=".fp32.", dir=room) as name:
        folder = Path(name)
        build_graph(
            config, source, folder,
            progress=lambda what, done, total: report("preparing", 0.02 + 0.08 * done / total),
        )  # fmt: skip
        calibration: Calibration | None = None
        if observations:
            calibration = calibrate(
                calibration_graph(folder), config, text, observations.values, observations.rotated,
                progress=lambda done, total: report("calibrating", 0.1 + 0.3 * done / total),
            )  # fmt: skip
        plan = plan_model(config, mixed, calibration=calibration, fetch=_fetcher(source))
        hessian: HessianSource | None = None
        if gptq:
            hessian = HessianSource(folder, config, text, plan)
            hessian.prefetch(lambda done, total: report("correlating", 0.4 + 0.1 * done / total))
        yield PreparedPlan(plan, text, held_out, hessian)


def _fetcher(source: Checkpoint) -> Callable[[str], NDArray[np.float32]]:
    return lambda name: to_numpy(source.tensor(name))


def _read_texts(
    source: Checkpoint, choice: TextChoice, tokenizer: Path | None
) -> tuple[CalibrationText, Tokens | None]:
    """Return the text to calibrate on, and its last sequences, held out for judging.

    None are held out of the greetings: other lines of them say little about other text.
    """
    config = source.config
    length = min(choice.length, config.max_context or choice.length)
    reserve = -(-HELD_OUT // length)
    reader = checkpoint_reader(source, config, tokenizer)
    text = read_text(choice.path, reader, choice.sequences + reserve, length)
    if text.sequences.max() >= config.vocab_size:
        raise ExportError(
            f"token {text.sequences.max()} is not one of the model's {config.vocab_size}",
            field="calibrate",
            remedy="give the tokenizer that belongs to the model with --tokenizer",
        )
    count = len(text.sequences)
    held_out = reserve if text.given and count >= 5 * reserve else 0
    used = min(choice.sequences, count - held_out)
    calibration_text = replace(text, sequences=text.sequences[:used], asked=choice.sequences)
    return calibration_text, text.sequences[count - held_out :] if held_out else None
