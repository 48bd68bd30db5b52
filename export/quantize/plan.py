"""How tensors are rounded: what a recipe can ask for, and the plan that it makes of one model.

A recipe is a table, tensor → how: a `Storage` for a weight, `Static` or `Dynamic` for an
activation; a tensor that a table leaves out stays floating. A recipe and a calibration make a plan,
which is what the graph builder is told; the plan is data, and knows no recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
StateType = Literal["fp32", "fp16", "int8"]
CacheType = Literal["fp32", "fp16"]
Clip = Literal["absmax", "percentile", "octav"]


@dataclass(frozen=True)
class Storage:
    """How a weight matrix [N, K] is kept.

    Attributes:
        bits: 32 or 16 floating, 8 or 4 rounded.
        block: columns that share a scale (`edge::LinearBits`, unsigned, for floating activations,
            or `edge::LinearInt4`); None with 8 bits is signed int8 for `edge::LinearInt8`.
        rows: with signed int8, one scale a row instead of one for the matrix.
        minimum: blocks of 4 bits have one, beside a scale, both in fp16 (`edge::LinearBitsMinimum`
            or `edge::LinearInt4Minimum`).
    """

    bits: Literal[4, 8, 16, 32]
    block: int | None = None
    rows: bool = False
    minimum: bool = False

    @property
    def int8(self) -> bool:
        """Signed int8, to be multiplied with int8 activations in integers."""
        return self.bits == 8 and self.block is None


F32 = Storage(32)
F16 = Storage(16)
INT8 = Storage(8)
INT8_ROWS = Storage(8, rows=True)
# Blocks tried, largest first, when those wanted do not divide a weight's columns.
_BLOCKS = (128, 64, 32)


def fitting(wanted: Storage, columns: int) -> Storage:
    """`wanted`, with blocks that divide the columns; fp32 where none does."""
    if wanted.block is None:
        return wanted
    largest = wanted.block
    block = next((b for b in _BLOCKS if b <= largest and columns % b == 0), None)
    return F32 if block is None else replace(wanted, block=block)


@dataclass(frozen=True)
class Static:
    """Scales found by calibration.

    Attributes:
        clip: the largest value kept: `absmax` keeps all; `percentile` cuts the rarest (Quamba,
            section 4.2); `octav` minimizes the squared error (OCTAV, arXiv 2206.06501, equation 6).
        rotate: rounded after a Hadamard rotation (Quamba, equation 3).
        smooth: α of SmoothQuant (arXiv 2211.10438, equation 4): a divisor a channel, whose inverse
            is in the weight's columns.
        outliers: channels with a calibration absmax of this or more, or of a few times the median,
            stay floating, the largest of them up to a sixteenth (after LLM.int8).
        groups: a scale for each of Quamba2's groups instead of one (arXiv 2503.22879, section 3):
            of x by head and channel, of B and C by SSD group. Mamba-2 only.
    """

    clip: Clip = "absmax"
    rotate: bool = False
    smooth: float | None = None
    outliers: float | None = None
    groups: bool = False


@dataclass(frozen=True)
class Dynamic:
    """A scale a token, absmax / 127 of what the token has.

    Attributes:
        outliers: values of this magnitude or more stay floating (LLM.int8), and have no say in the
            scale. Of what products read alone.
    """

    outliers: float | None = None


Activation: TypeAlias = Static | Dynamic
Table: TypeAlias = Mapping[str, Storage | Activation]


@dataclass(frozen=True)
class Rounding:
    """How one activation is rounded to int8 along its last axis of C values.

    Attributes:
        scale: f32 [1] or [C]; None is one scale a row (a token), absmax/127, found at run time.
        threshold: with such a scale, of values that are not rounded; None rounds all.
        rotate: rounded after the Hadamard rotation of its last axis, the scale being that of the
            rotated values.
    """

    scale: Vector | None
    rotate: bool = False
    threshold: float | None = None

    @property
    def plain(self) -> bool:
        """A scale known beforehand and no rotation: what a fused op can do at its end."""
        return self.scale is not None and not self.rotate


@dataclass(frozen=True)
class Product:
    """How y = x · Wᵀ runs. What is done to x is undone in the columns of W before W is rounded.

    Attributes:
        weight: how W is kept.
        input: how x is rounded; None leaves it floating.
        outliers: columns of x and W, ascending, that stay floating, in a second product
            (after LLM.int8, arXiv 2208.07339, section 3.2); `input` then neither rotates nor finds
            scales at run time. Where it has a threshold, any column may be in that product.
    """

    weight: Storage
    input: Rounding | None = None
    outliers: tuple[int, ...] = ()

    @property
    def apart(self) -> bool:
        """Whether there is a second product, of fp16 columns."""
        return bool(self.outliers) or (self.input is not None and self.input.threshold is not None)


@dataclass(frozen=True)
class ScanPlan:
    """How a Mamba layer's convolution and scan run.

    Attributes:
        fused: int8 ops, for which every site needs a scale known beforehand and in_proj, x_proj and
            dt_proj are integer products; otherwise floating ops on values that were rounded and
            brought back (`edge::FakeQuantize`), which are the same numbers.
        sites: conv_in, z, x, dt, B and C → Rounding. A site that is absent stays floating.
        constants: which of conv1d (weight and bias), A_log, D and dt_bias are rounded to int8; all
            of them where fused.
        state: type of ssm_state, which is rounded after every token. fp32 where not fused.
        state_scale: for int8, broadcast against the state: f32 [1], [N, 1] (Mamba-1) or [H, 1, N].
    """

    fused: bool
    sites: Mapping[str, Rounding]
    constants: frozenset[str] = frozenset()
    state: StateType = "fp32"
    state_scale: Vector | None = None


@dataclass(frozen=True)
class LayerPlan:
    """Products by matrix name (`in_proj`, `qkv_proj`, …); `scan` None is floating throughout;
    `cache` is what keys and values are kept in.
    """

    products: Mapping[str, Product]
    scan: ScanPlan | None = None
    cache: CacheType = "fp32"


@dataclass(frozen=True)
class ModelPlan:
    """The whole model.

    Attributes:
        recipe: its name, for messages.
        embedding, head: the same matrix, so the same storage, where the model ties them.
        layers: one a layer, in order.
        record: what the manifest tells of it: scales, ranges, clipped fractions, calibration.
    """

    recipe: str
    embedding: Storage
    head: Product
    layers: tuple[LayerPlan, ...]
    record: Mapping[str, Any] = field(default_factory=dict)

    def products(self) -> list[Product]:
        """Every product, the head last."""
        return [p for layer in self.layers for p in layer.products.values()] + [self.head]

    @property
    def bits(self) -> int:
        """Bits of the smallest weights."""
        return min(self.embedding.bits, *(product.weight.bits for product in self.products()))

    @property
    def exact(self) -> bool:
        """Whether every product is what its op says to the bit of a sum: an implementation of
        `edge::LinearBits` may round its input, and ONNX Runtime's does."""
        return not any(p.input is None and p.weight.block is not None for p in self.products())
