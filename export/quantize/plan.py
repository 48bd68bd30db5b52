"""What the graph builder is told about one model: how every product, scan and table is rounded.

A recipe and a calibration make a plan; the plan is data, and knows no recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
StateType = Literal["fp32", "fp16", "int8"]


@dataclass(frozen=True)
class Storage:
    """How a weight matrix [N, K] is kept.

    Attributes:
        bits: 32 or 16 floating, 8 or 4 rounded.
        block: columns that share a scale (`edge::LinearBits`, unsigned, floating activations or
            `edge::LinearInt4`); None with 8 bits is signed int8 for `edge::LinearInt8`.
        rows: with int8, one scale a row instead of one for the matrix.
    """

    bits: int
    block: int | None = None
    rows: bool = False

    @property
    def int8(self) -> bool:
        return self.bits == 8 and self.block is None


@dataclass(frozen=True)
class Rounding:
    """How one activation is rounded to int8 along its last axis of C values.

    Attributes:
        scale: f32 [1] or [C]; None is one scale a row, absmax/127, found at run time.
        rotate: rounded after the Hadamard rotation of its last axis.
    """

    scale: F32 | None
    rotate: bool = False


@dataclass(frozen=True)
class Product:
    """How y = x · Wᵀ runs.

    Attributes:
        weight: how W is kept.
        input: how x is rounded; None leaves it floating. Its rotation is undone in W.
        x_scale: scalar of the product when `input` is static: x ≈ q · x_scale · divisor.
        divisor: f32 [K]; columns of W are multiplied by it, and `input.scale` has it as a factor
            (SmoothQuant's smoothing that could not be folded elsewhere).
        outliers: columns of x and W that stay floating, in a second product.
        output: rounds y to int8 with these scales, f32 [1] or [N].
    """

    weight: Storage
    input: Rounding | None = None
    x_scale: float | None = None
    divisor: F32 | None = None
    outliers: tuple[int, ...] = ()
    output: F32 | None = None


@dataclass(frozen=True)
class ScanPlan:
    """How a Mamba layer's convolution and scan run.

    Attributes:
        fused: int8 ops, for which every site needs a static scale; otherwise floating ops on
            values that were rounded and brought back (`edge::FakeQuantize`).
        sites: conv_in, z, x, B, C, dt (and y of Mamba-1, when no product says) → Rounding.
        constants: conv weight and bias, A_log, D and dt_bias in int8.
        state: type of ssm_state; it is rounded after every token.
        state_scale: for int8, broadcast against the state: f32 [1], [N, 1] (Mamba-1) or [H, 1, N].
    """

    fused: bool
    sites: Mapping[str, Rounding]
    constants: bool = True
    state: StateType = "fp32"
    state_scale: F32 | None = None


@dataclass(frozen=True)
class LayerPlan:
    """Products by matrix name (`in_proj`, `qkv_proj`, …); `scan` None is floating throughout."""

    products: Mapping[str, Product]
    scan: ScanPlan | None = None


@dataclass(frozen=True)
class ModelPlan:
    """The whole model.

    Attributes:
        record: what the manifest tells of it: scales, ranges, clipped fractions, calibration.
    """

    recipe: str
    embedding: Storage
    head: Product
    layers: tuple[LayerPlan, ...]
    record: Mapping[str, Any] = field(default_factory=dict)
