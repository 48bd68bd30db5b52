"""XᵀX of the inputs of 4-bit matrices, for GPTQ, as many at a time as memory allows."""

from __future__ import annotations

from pathlib import Path

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


class HessianSource:
    """Hessians by the weight that reads the value, asked for in the graph's order.

    `folder` is where the fp32 graph is.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, text: CalibrationText, plan: ModelPlan
    ) -> None:
        self.folder, self.config, self.text = folder, config, text
        # weight → the value that it multiplies, and whether that is rotated
        self._batches: list[dict[str, tuple[str, bool]]] = []
        self._held: dict[str, Hessian] = {}
        size = LIMIT
        for index, (layer, how) in enumerate(zip(config.layers, plan.layers, strict=True)):
            for name, matrix in mixer_of(layer).matrices(config.d_model).items():
                product = how.products[name]
                if product.weight.bits != 4 or matrix.experts:
                    continue
                size += 8 * matrix.columns**2
                if not self._batches or size > LIMIT:
                    self._batches.append({})
                    size = 8 * matrix.columns**2
                rotated = product.input is not None and product.input.rotate
                value = f"layers.{index}.{matrix.reads}"
                self._batches[-1][f"layers.{index}.{name}.weight"] = (value, rotated)

    def __call__(self, weight: str) -> F64 | None:
        """XᵀX of a matrix's input, as the product rounds it: rotated, where it is. None for a
        matrix that is not kept in 4 bits."""
        if weight not in self._held and any(weight in batch for batch in self._batches):
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
        plain, turned = hessians(
            calibration_graph(self.folder),
            self.config,
            self.text,
            [value for value, rotated in batch.values() if not rotated],
            [value for value, rotated in batch.values() if rotated],
            progress=progress,
        )
        self._held = {
            weight: (turned if rotated else plain)[value]
            for weight, (value, rotated) in batch.items()
        }
