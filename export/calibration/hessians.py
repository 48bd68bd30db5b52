"""XᵀX of the inputs of 4-bit matrices, for GPTQ, as many at a time as memory allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.config import ModelConfig
from edge.export.calibration.calibrate import Progress, calibration_graph, hessians
from edge.export.calibration.texts import CalibrationText
from edge.export.mixers import mixer_of
from edge.export.quantize.observers import Hessian
from edge.export.quantize.plan import ModelPlan

F64 = NDArray[np.float64]
# Bytes of matrices held at once. Each batch runs the text through the model again.
LIMIT = 2 << 30


@dataclass(frozen=True)
class _Wanted:
    weight: str
    value: str
    rotated: bool
    nbytes: int


@dataclass
class HessianSource:
    """Hessians by the weight that reads the value, asked for in the graph's order.

    Attributes:
        folder: where the fp32 graph is.
    """

    folder: Path
    config: ModelConfig
    text: CalibrationText
    plan: ModelPlan
    _batches: list[list[_Wanted]] = field(default_factory=list)
    _held: dict[str, Hessian] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = 0
        for wanted in self._every():
            if not self._batches or size + wanted.nbytes > LIMIT:
                self._batches.append([])
                size = 0
            self._batches[-1].append(wanted)
            size += wanted.nbytes

    def _every(self) -> list[_Wanted]:
        found = []
        for index, (layer, how) in enumerate(
            zip(self.config.layers, self.plan.layers, strict=True)
        ):
            for name, matrix in mixer_of(layer).matrices(self.config.d_model).items():
                product = how.products[name]
                if product.weight.bits == 4:
                    rotated = product.input is not None and product.input.rotate
                    value = f"layers.{index}.{matrix.reads}"
                    weight = f"layers.{index}.{name}.weight"
                    found.append(_Wanted(weight, value, rotated, 8 * matrix.columns**2))
        return found

    def __call__(self, weight: str) -> F64 | None:
        """XᵀX of a matrix's input, as the product rounds it: rotated, where it is. None for a
        matrix that is not kept in 4 bits."""
        if weight not in self._held and any(w.weight == weight for b in self._batches for w in b):
            self._next()
        found = self._held.pop(weight, None)
        return None if found is None else found.total

    def prefetch(self, progress: Progress | None = None) -> None:
        """Run the text for the first matrices asked for: of all but large models, for all."""
        if self._batches:
            self._next(progress)

    def _next(self, progress: Progress | None = None) -> None:
        batch = self._batches.pop(0)
        self._held.clear()
        values: Any
        values, turned = hessians(
            calibration_graph(self.folder),
            self.config,
            self.text,
            [w.value for w in batch if not w.rotated],
            [w.value for w in batch if w.rotated],
            progress=progress,
        )
        self._held = {w.weight: (turned if w.rotated else values)[w.value] for w in batch}
