"""What one program of a product computes, and how products are launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge.launch import Size
from edge.plugins.lowering.context import ONE, Arguments, Lowering, Rows, Warps, cdiv


@dataclass(frozen=True)
class Tile:
    """One program's share of x [rows, K] · weight [N, K]ᵀ.

    Attributes:
        m: its rows; of `few` kernels all there can be, 8 or 16.
        n, k: its outputs, and the columns of a step.
        warps, stages: `num_warps`, `num_stages`; stages - 1 steps are on their way from memory.
        split: parts of the columns that warps sum side by side, for kernels that can.
    """

    m: int
    n: int
    k: int
    warps: Warps
    stages: int
    split: int = 1

    @property
    def many(self) -> bool:
        return self.m > 16


def few_rows(at: Lowering) -> int:
    """Rows of a `few` kernel's tile."""
    return 8 if at.regime.max_rows == 1 else 16


def launch_product(
    at: Lowering,
    file: str,
    pointers: Arguments,
    constants: Mapping[str, int],
    tile: Tile,
    rows: Rows,
    *,
    settles: bool = False,
) -> None:
    """`few` or `many` of a kernel file, as the tile is. `constants` has N, the outputs."""
    outputs = Size(times=cdiv(constants["N"], tile.n))
    at.launch(
        f"{file}.{'many' if tile.many else 'few'}",
        pointers,
        {
            **constants,
            "BLOCK_M" if tile.many else "ROWS": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
        },
        # neighbours share their weights
        (Size(of=rows, per=tile.m) if tile.many else ONE, outputs),
        warps=tile.warps,
        stages=tile.stages,
        settles=settles,
    )
