"""Quamba's recipes (arXiv 2410.13229; Quamba2, arXiv 2503.22879), for Mamba and for hybrids.

Read a table as: this tensor is kept so. Activations have the names they have in the fp32 graph.
"""

from __future__ import annotations

from dataclasses import replace

from edge.export.quantize.how import Static, Table, blocks
from edge.export.quantize.plan import INT8, INT8_ROWS, Storage
from edge.export.quantize.recipes import Recipe

ABSMAX = Static()
PERCENTILE = Static(clip="percentile")
HADAMARD = Static(rotate=True)
# LLM.int8() (arXiv 2208.07339): channels that reach 6 stay floating, weights have a scale a row
OUTLIERS = Static(outliers=6.0)

ENDS: Table = {"embedding": INT8_ROWS, "final": ABSMAX, "head": INT8_ROWS}


def mamba1(x: Static, y: Static, normed: Static = ABSMAX, low: Static = ABSMAX) -> Table:
    """Quamba, figure 4, and its code: every tensor has one scale."""
    return {
        "normed": normed,
        "in_proj": INT8,
        "xz": ABSMAX,  # x before the convolution, and the gate z: one scale for both
        "conv1d": INT8,
        "conv": x,  # x: what x_proj and the scan read
        "x_proj": INT8,
        "dbc": low,  # dt of low rank, B and C: one scale for the three
        "dt_proj": INT8,
        "dt": ABSMAX,  # before its bias and softplus
        "A_log": INT8,
        "D": INT8,
        "dt_bias": INT8,
        "scan": y,
        "out_proj": INT8,
    }


def mamba2(
    x: Static,
    y: Static,
    normed: Static = ABSMAX,
    BC: Static = ABSMAX,
    big: Storage = INT8,
) -> Table:
    """The same for Mamba-2, whose gate is part of the norm after the scan."""
    return {
        "normed": normed,
        "in_proj": big,
        "z": ABSMAX,
        "xBC": ABSMAX,  # x, B and C before the convolution: a scale each
        "dt": ABSMAX,
        "conv1d": INT8,
        "x": x,
        "B": BC,
        "C": BC,
        "A_log": INT8,
        "D": INT8,
        "dt_bias": INT8,
        "gated": y,
        "out_proj": big,
    }


def attention(reads: Static, weights: Storage) -> Table:
    return {"normed": reads, "qkv_proj": weights, "attended_time": reads, "o_proj": weights}


def mlp(reads: Static, weights: Storage) -> Table:
    return {"normed": reads, "gate_up_proj": weights, "gated": reads, "down_proj": weights}


W8A8 = Recipe(
    "w8a8",
    8,
    None,
    ENDS,
    {
        "mamba1": mamba1(x=PERCENTILE, y=HADAMARD),
        "mamba2": mamba2(x=PERCENTILE, y=HADAMARD),
        "attention": attention(OUTLIERS, INT8_ROWS),
        "mlp": mlp(OUTLIERS, INT8_ROWS),
    },
    {"weights": "int8", "activations": "int8, static", "method": "Quamba"},
)


def _octav(table: Table) -> Table:
    """OCTAV in place of every absmax and percentile.

    The paper names no sites: "a clipping optimization algorithm can be applied to Quamba" (section
    5.1) follows the sentence on the scales of all operators, so it is taken to mean all of them.
    xBC keeps its absmax, being counted as a whole and scaled in parts, and so do channels beside
    floating ones.
    """
    return {
        name: replace(how, clip="octav")
        if isinstance(how, Static) and how.outliers is None and name != "xBC"
        else how
        for name, how in table.items()
    }


W8A8_O = Recipe(
    "w8a8-o",
    8,
    None,
    _octav(ENDS),
    {kind: _octav(table) for kind, table in W8A8.layers.items()},
    {"weights": "int8", "activations": "int8, static", "method": "Quamba-O"},
)

_INT4 = blocks(4, 128)
_GROUPS = Static(groups=True)
_W4A8_MAMBA1 = dict(mamba1(x=PERCENTILE, y=HADAMARD)) | {"in_proj": _INT4, "out_proj": _INT4}

W4A8 = Recipe(
    "w4a8",
    4,
    128,
    ENDS,
    {
        "mamba1": _W4A8_MAMBA1,
        "mamba2": mamba2(x=_GROUPS, y=HADAMARD, BC=_GROUPS, big=_INT4),
        "attention": attention(ABSMAX, _INT4),
        "mlp": mlp(ABSMAX, _INT4),
    },
    {"weights": "int4; x_proj, dt_proj int8", "activations": "int8, static", "method": "Quamba2"},
)

ALL = (W8A8, W8A8_O, W4A8)
