"""The vocabulary of recipes: how a tensor can be rounded.

A recipe is a table, tensor → how. Weights are said by a `Storage` (`edge.export.quantize.plan`),
activations by `Static` or `Dynamic`; a tensor that a table leaves out stays floating.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from edge.export.quantize.plan import Storage

Clip = Literal["absmax", "percentile", "octav"]


@dataclass(frozen=True)
class Static:
    """Scales found by calibration.

    Attributes:
        clip: the largest value kept: `absmax` keeps all; `percentile` cuts the rarest (Quamba,
            section 4.2); `octav` minimizes the squared error (OCTAV, arXiv 2206.06501, equation 6).
        rotate: rounded after a Hadamard rotation (Quamba, equation 3).
        smooth: α of SmoothQuant (arXiv 2211.10438, equation 4): a divisor a channel, whose inverse
            is in the weight's columns.
        outliers: channels with a calibration absmax of this or more stay floating (LLM.int8).
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
    """A scale a token, absmax / 127 of what the token has."""


Activation: TypeAlias = Static | Dynamic
Table: TypeAlias = Mapping[str, Storage | Activation]


def blocks(bits: Literal[4, 8], columns: int) -> Storage:
    """A scale a row and `columns` columns, or a smaller number that divides the matrix."""
    return Storage(bits, columns)
