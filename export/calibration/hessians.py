"""Compute XᵀX of the inputs of 4-bit matrices, for GPTQ, in batches that fit in memory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.config import ModelConfig
from edge.export.calibration.calibrate import Progress, calibration_graph, hessians
from edge.export.calibration.texts import CalibrationText
from edge.export.mixers import mixer_of
from edge.export.quantize.observers import ExpertHessians, Hessian, Routes
from edge.export.quantize.plan import ModelPlan

F64 = NDArray[np.float64]
# Maximum bytes of matrices held at once. Each batch runs the text through the model again.
LIMIT = 2 << 30


class _MatrixInput(NamedTuple):
    """The input of a weight: a value, rotated or not, and the value that routes its slots."""

    value: str
    rotated: bool
    chosen: str
    routes: Routes | None


class HessianSource:
    """Source of Hessians by weight, which must be requested in the graph's order.

    `folder` contains the fp32 graph.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, text: CalibrationText, plan: ModelPlan
    ) -> None:
        self.folder, self.config, self.text = folder, config, text
        self._batches: list[dict[str, _MatrixInput]] = []
        self._computed: dict[str, Hessian | ExpertHessians] = {}
        # matrix of experts → tokens that each expert read, and the number it needs
        self._routed: dict[str, tuple[Routes, int]] = {}
        batch_bytes = LIMIT
        for index, (layer, layer_plan) in enumerate(zip(config.layers, plan.layers, strict=True)):
            for name, matrix in mixer_of(layer).matrices(config.d_model).items():
                product = layer_plan.products[name]
                if product.weight.bits != 4:
                    continue
                matrix_bytes = 8 * matrix.columns**2 * (matrix.experts if matrix.routed else 1)
                batch_bytes += matrix_bytes
                if not self._batches or batch_bytes > LIMIT:
                    self._batches.append({})
                    batch_bytes = matrix_bytes
                prefix = f"layers.{index}"
                routes = None
                if matrix.routed:
                    routes = Routes(matrix.experts)
                    self._routed[f"{prefix}.{name}"] = routes, matrix.columns
                self._batches[-1][f"{prefix}.{name}.weight"] = _MatrixInput(
                    f"{prefix}.{matrix.reads}",
                    product.input is not None and product.input.rotate,
                    f"{prefix}.{matrix.routed}",
                    routes,
                )

    def __call__(self, weight: str) -> F64 | None:
        """Return XᵀX of a matrix's input, rotated if the product rotates it, or None for a matrix
        that is not stored in 4 bits."""
        if weight not in self._computed and any(weight in batch for batch in self._batches):
            self._compute_next()
        hessian = self._computed.pop(weight, None)
        return None if hessian is None else hessian.total

    def prefetch(self, progress: Progress | None = None) -> None:
        """Run the text for the first batch of matrices, which holds all but large models."""
        if self._batches:
            self._compute_next(progress)

    def thin(self) -> dict[str, list[int]]:
        """Return matrix → experts that read fewer tokens than their matrix has columns.

        So few cannot distinguish the columns. Covers only the batches computed so far.
        """
        starved = {
            name: np.flatnonzero(routes.tokens < minimum)
            for name, (routes, minimum) in self._routed.items()
        }
        return {name: experts.tolist() for name, experts in starved.items() if experts.size}

    def _compute_next(self, progress: Progress | None = None) -> None:
        batch = self._batches.pop(0)
        self._computed.clear()
        plain, rotated = hessians(
            calibration_graph(self.folder),
            self.config,
            self.text,
            [entry.value for entry in batch.values() if not entry.rotated and entry.routes is None],
            [entry.value for entry in batch.values() if entry.rotated],
            {entry.value: (entry.chosen, entry.routes) for entry in batch.values() if entry.routes},
            progress=progress,
        )
        self._computed = {
            weight: (rotated if entry.rotated else plain)[entry.value]
            for weight, entry in batch.items()
        }
