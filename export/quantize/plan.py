"""How tensors are rounded: the options of a recipe, and the plan that it makes for one model.

A recipe is a table that maps a weight to a `Storage`, and an activation to `Static` or `Dynamic`.
Tensors that the table omits stay floating. A recipe and a calibration make a plan, which the graph
builder follows. The plan is data and does not depend on the recipe.
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
    """How a weight matrix [N, K] is stored.

    Attributes:
        bits: 32 or 16 for floating, 8 or 4 for quantized.
        block: number of columns that share a scale (`edge::LinearBits`, unsigned, for floating
            activations, or `edge::LinearInt4`); None with 8 bits is signed int8 for
            `edge::LinearInt8`.
        rows: with signed int8, one scale per row instead of one per matrix.
        minimum: whether blocks of 4 bits have a minimum beside the scale, both in fp16
            (`edge::LinearBitsMinimum` or `edge::LinearInt4Minimum`).
    """

    bits: Literal[4, 8, 16, 32]
    block: int | None = None
    rows: bool = False
    minimum: bool = False

    @property
    def int8(self) -> bool:
        """Whether this is signed int8, multiplied with int8 activations in integers."""
        return self.bits == 8 and self.block is None


F32 = Storage(32)
F16 = Storage(16)
INT8 = Storage(8)
INT8_ROWS = Storage(8, rows=True)
# Block sizes to try, largest first, if the requested one does not divide a weight's columns.
_BLOCKS = (128, 64, 32)


def fitting(wanted: Storage, columns: int) -> Storage:
    """Return `wanted` with a block that divides the columns, or fp32 if none does."""
    if wanted.block is None:
        return wanted
    largest = wanted.block
    block = next((b for b in _BLOCKS if b <= largest and columns % b == 0), None)
    return F32 if block is None else replace(wanted, block=block)


@dataclass(frozen=True)
class Static:
    """Rounding by scales found in calibration.

    Attributes:
        clip: rule for the largest value kept: `absmax` keeps all, `percentile` clips the rarest
            (Quamba, section 4.2), `octav` minimizes the squared error (OCTAV, arXiv 2206.06501,
            equation 6).
        rotate: whether to round after a Hadamard rotation (Quamba, equation 3).
        smooth: α of SmoothQuant (arXiv 2211.10438, equation 4): a divisor per channel, which the
            weight's columns are multiplied by.
        outliers: absmax from which a channel stays floating; so do channels of a few times the
            median. Only the largest do, at most a sixteenth of all (after LLM.int8).
        groups: whether Quamba2's groups have a scale each (arXiv 2503.22879, section 3): x by head
            and channel, B and C by SSD group. Mamba-2 only.
    """

    clip: Clip = "absmax"
    rotate: bool = False
    smooth: float | None = None
    outliers: float | None = None
    groups: bool = False


@dataclass(frozen=True)
class Dynamic:
    """Rounding by one scale per token, found at run time: the token's absmax / 127.

    Attributes:
        outliers: magnitude from which values stay floating and do not count for the scale
            (LLM.int8). Only for inputs of products.
    """

    outliers: float | None = None


Activation: TypeAlias = Static | Dynamic
Table: TypeAlias = Mapping[str, Storage | Activation]


@dataclass(frozen=True)
class Rounding:
    """How one activation is rounded to int8 along its last axis of C values.

    Attributes:
        scale: f32 [1] or [C]; None is one scale per row (token), absmax/127, found at run time.
        threshold: without `scale`, the magnitude from which values are not rounded; None rounds
            all.
        rotate: whether the last axis is Hadamard-rotated first; `scale` then applies to the rotated
            values.
    """

    scale: Vector | None
    rotate: bool = False
    threshold: float | None = None

    @property
    def plain(self) -> bool:
        """Whether a fused op can round at its end: a known scale and no rotation."""
        return self.scale is not None and not self.rotate


@dataclass(frozen=True)
class Product:
    """How y = x · Wᵀ runs. W's columns undo the scaling and rotation of x before W is rounded.

    Attributes:
        weight: how W is stored.
        input: how x is rounded; None leaves it floating.
        outliers: columns of x and W, ascending, that stay floating in a second product (after
            LLM.int8, arXiv 2208.07339, section 3.2). `input` then neither rotates nor finds scales
            at run time. With `input.threshold`, any column may be in the second product.
    """

    weight: Storage
    input: Rounding | None = None
    outliers: tuple[int, ...] = ()

    @property
    def apart(self) -> bool:
        """Whether there is a second product with fp16 columns."""
        return bool(self.outliers) or (self.input is not None and self.input.threshold is not None)


@dataclass(frozen=True)
class ScanPlan:
    """How a Mamba layer's convolution and scan run.

    Attributes:
        fused: whether int8 ops run, which needs a calibrated scale for every site, and in_proj,
            x_proj and dt_proj as integer products. Otherwise floating ops run on fake-quantized
            values (`edge::FakeQuantize`), which are the same numbers.
        sites: conv_in, z, x, dt, B and C → Rounding. A missing site stays floating.
        constants: which of conv1d (weight and bias), A_log, D and dt_bias are rounded to int8; all
            of them if fused.
        state: type of ssm_state, which is rounded after every token; fp32 if not fused.
        state_scale: scale of an int8 state, broadcast against it: f32 [1], [N, 1] (Mamba-1) or
            [H, 1, N].
    """

    fused: bool
    sites: Mapping[str, Rounding]
    constants: frozenset[str] = frozenset()
    state: StateType = "fp32"
    state_scale: Vector | None = None


@dataclass(frozen=True)
class LayerPlan:
    """Plan of one layer.

    Attributes:
        products: matrix name (`in_proj`, `qkv_proj`, …) → product.
        scan: plan of a Mamba scan; None is floating throughout.
        cache: type of keys and values.
    """

    products: Mapping[str, Product]
    scan: ScanPlan | None = None
    cache: CacheType = "fp32"


@dataclass(frozen=True)
class ModelPlan:
    """Plan of the whole model.

    Attributes:
        recipe: name of the recipe, for messages.
        embedding, head: how the ends are stored; a model that ties them has one matrix, so one
            storage.
        layers: plan of each layer, in order.
        record: scales, ranges, clipped fractions and calibration, for the manifest.
    """

    recipe: str
    embedding: Storage
    head: Product
    layers: tuple[LayerPlan, ...]
    record: Mapping[str, Any] = field(default_factory=dict)

    def products(self) -> list[Product]:
        """Return every product, the head's last."""
        return [p for layer in self.layers for p in layer.products.values()] + [self.head]

    @property
    def bits(self) -> int:
        """Bits of the smallest weights."""
        return min(self.embedding.bits, *(product.weight.bits for product in self.products()))

    @property
    def exact(self) -> bool:
        """Whether engines compute every product exactly, up to the order of sums.

        `edge::LinearBits` may round its input, and ONNX Runtime's does.
        """
        return not any(p.input is None and p.weight.block is not None for p in self.products())
