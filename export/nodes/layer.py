"""A layer under construction: the names and the plan that all its nodes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from edge.config import RopeConfig
from edge.export.nodes.builder import F32, GraphBuilder
from edge.export.nodes.products import (
    ProductInput,
    experts,
    fake_round,
    linear,
    linear_to_int8,
    round_input,
)
from edge.export.quantize.layer_plan import Matrix
from edge.export.quantize.plan import LayerPlan, ScanPlan


@dataclass
class Shared:
    """Names of graph inputs, and of values computed once and used by many layers."""

    taps: dict[int, tuple[str, str]] = field(default_factory=dict)
    rotations: dict[RopeConfig, tuple[str, str]] = field(default_factory=dict)
    # by attention's window; None without one
    biases: dict[int | None, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerGraph:
    """A layer under construction.

    Attributes:
        prefix: the layer's name, such as `layers.3`.
        matrices: the layer's products.
        weight: function of a weight's name and a source of canonical tensors; returns the weight as
            the graph has it.
    """

    g: GraphBuilder
    prefix: str
    plan: LayerPlan
    shared: Shared
    matrices: Mapping[str, Matrix]
    weight: Callable[[str, Callable[[str], F32]], F32]

    def named(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def tensor(self, name: str) -> F32:
        """Fetch a weight of the layer as the graph has it."""
        return self.weight(name, lambda own: self.g.tensor(self.named(own)))

    @property
    def scan(self) -> ScanPlan:
        """The plan of the scan, for layers that have one."""
        assert self.plan.scan is not None
        return self.plan.scan

    def split(self, value: str, parts: dict[str, int]) -> list[str]:
        """Split the last axis into `parts`, name → width."""
        names = [self.named(name) for name in parts]
        return self.g.nodes("Split", [value, self.g.integers([*parts.values()])], names, axis=-1)

    def linear(self, matrix: str, x: ProductInput | str, output: str, bias: bool = False) -> str:
        """Add x · matrixᵀ, plus a bias if there is one; x is rounded as the product reads it."""
        name, product = self.named(f"{matrix}.weight"), self.plan.products[matrix]
        bias_name = None
        if bias:
            bias_name = self.named(f"{matrix}.bias")
            self.g.constant(bias_name, self.tensor(f"{matrix}.bias"))
        if isinstance(x, str):
            x = round_input(self.g, x, product, self.matrices[matrix].columns)
        return linear(
            self.g, x, name, self.named(output), product, bias=bias_name,
            make=lambda: self.tensor(f"{matrix}.weight"),
        )  # fmt: skip

    def experts(
        self, matrix: str, x: str, routed: tuple[str, str], output: str, parts: int = 1
    ) -> str:
        """Add x · matrixᵀ of the chosen experts.

        `routed` are the values `chosen` and `order` of `plugins.experts`.
        """
        name, product = self.named(f"{matrix}.weight"), self.plan.products[matrix]
        return experts(
            self.g, x, routed, name, self.named(output), product, parts,
            make=lambda: self.tensor(f"{matrix}.weight"),
        )  # fmt: skip

    def linear_to_int8(self, matrix: str, x: ProductInput, output: str, scale: str) -> str:
        name, product = self.named(f"{matrix}.weight"), self.plan.products[matrix]
        return linear_to_int8(self.g, x, name, self.named(output), product, scale)

    def site(self, name: str, value: str, columns: int) -> str:
        """Return a floating value, fake-quantized where the plan of the scan says so."""
        if self.plan.scan is None:
            return value
        return fake_round(self.g, value, self.plan.scan.sites.get(name), columns)


def joined(*parts: tuple[F32, int]) -> F32:
    """Join the scales of parts side by side, (scale [1] or [C], C) each; [1] if all are equal."""
    scales = np.concatenate([np.broadcast_to(scale.reshape(-1), width) for scale, width in parts])
    return scales[:1] if (scales == scales[0]).all() else scales
