"""The recipes: weight-only ones, Quamba's (arXiv 2410.13229; Quamba2, arXiv 2503.22879) for Mamba
and hybrids, and the methods that Quamba's paper compares with (section 6, appendix H).

A table maps a tensor to how it is stored or rounded. Activations are named as in the fp32 graph.
In weight-only recipes, norms, convolutions, biases, A, D and dt_bias stay fp32: they are small and
steer the recurrence. `x_proj` and `dt_proj` compute Δ, B and C, to which an SSM is most sensitive
(Quamba, section 4.1), and are together 4 % of a Mamba-1 layer. So `dt_proj` stays fp32, or fp16
in 4-bit recipes as in Quamba2's code, and `x_proj` keeps 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edge.export.quantize.plan import (
    F16,
    F32,
    INT8,
    INT8_ROWS,
    Activation,
    Dynamic,
    Static,
    Storage,
    Table,
)
from edge.export.recipes.base import Recipe

Layers = dict[str, Table]

# A scale per row and 128 columns, or fewer where 128 does not divide the matrix.
_W8 = Storage(8, 128)
# A scale and a minimum per block.
_W4, _W4_128 = Storage(4, 32, minimum=True), Storage(4, 128, minimum=True)


# -- weight-only ----------------------------------------------------------------------------------


def _weights(main: Storage, x_proj: Storage = _W8, dt_proj: Storage = F32) -> Layers:
    return {
        "mamba1": {"in_proj": main, "x_proj": x_proj, "dt_proj": dt_proj, "out_proj": main},
        "mamba2": {"in_proj": main, "out_proj": main},
        "attention": {"qkv_proj": main, "o_proj": main},
        "mlp": {"gate_up_proj": main, "down_proj": main},
        "shortconv": {"in_proj": main, "out_proj": main},
        "gated_deltanet": {"in_proj": main, "out_proj": main},
        "experts": {"gate_up_proj": main, "down_proj": main},
    }


def _ends(storage: Storage) -> Table:
    return {"embedding": storage, "head": storage}


FP32 = Recipe("fp32", 32, None, {}, {}, kv_cache="fp32")
FP16 = Recipe("fp16", 16, None, _ends(F16), _weights(F16, F16), {"activations": "fp32"})
W8 = Recipe(
    "w8", 8, 128, _ends(_W8), _weights(_W8),
    {"weights": "int8, absmax", "activations": "fp32"},
)  # fmt: skip
W4 = Recipe(
    "w4", 4, 32, _ends(_W8), _weights(_W4, dt_proj=F16),
    {"weights": "int4 with minimums; x_proj, embedding, head int8", "activations": "fp32"},
)  # fmt: skip

# "in groups of 128 for the big projections", as Quamba2 stores 4-bit weights; GPTQ rounds them when
# calibrated.
W4A16 = Recipe(
    "w4a16", 4, 128, _ends(_W8), _weights(_W4_128, dt_proj=F16),
    {"weights": "int4 with minimums; x_proj, embedding, head int8", "activations": "fp32"},
)  # fmt: skip

# -- Quamba ---------------------------------------------------------------------------------------

ABSMAX = Static()
PERCENTILE = Static(clip="percentile")
HADAMARD = Static(rotate=True)
# LLM.int8() (arXiv 2208.07339): values from 6 on stay floating, tokens and rows have a scale each
LLM_INT8 = Dynamic(outliers=6.0)
# the same for calibrated channels, at most a sixteenth, with one scale for all tokens
CAPPED_LLM_INT8 = Static(outliers=6.0)

# One static scale for the head's input cost SmolLM2 more than any other rounding.
ENDS: Table = {"embedding": INT8_ROWS, "final": Dynamic(), "head": INT8_ROWS}
_STATIC_ENDS: Table = {**ENDS, "final": ABSMAX}


def mamba1(x: Static, y: Static, normed: Static = ABSMAX, low: Static = ABSMAX) -> Table:
    """Return Quamba's table for Mamba-1 (figure 4, and its code): one scale per tensor."""
    return {
        "normed": normed,
        "in_proj": INT8,
        "xz": ABSMAX,  # x before the convolution and the gate z share a scale
        "conv1d": INT8,
        "conv": x,  # x as x_proj and the scan read it
        "x_proj": INT8,
        "dbc": low,  # low-rank dt, B and C share a scale
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
    """Return the same for Mamba-2, whose gate is part of the norm after the scan."""
    return {
        "normed": normed,
        "in_proj": big,
        "z": ABSMAX,
        "xBC": ABSMAX,  # x, B and C before the convolution have a scale each
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


def _transformer(inputs: Activation, weights: Storage) -> Layers:
    """Return tables for attention, MLPs, and the products of mixers that otherwise stay floating.

    Inputs of experts have a scale per token, found at run time: no calibration text exercises every
    expert enough. Weights have a scale per row or block (LLM.int8(), as in Quamba's Jamba).
    """
    row: Activation = Dynamic()
    stacked = INT8_ROWS if weights.block is None else weights
    return {
        "attention": {
            "normed": inputs, "qkv_proj": weights, "attended_time": inputs, "o_proj": weights,
        },
        "mlp": {"normed": inputs, "gate_up_proj": weights, "gated": inputs, "down_proj": weights},
        "shortconv": {"normed": inputs, "in_proj": weights, "gated": inputs, "out_proj": weights},
        "gated_deltanet": {
            "normed": inputs, "in_proj": weights, "gated": inputs, "out_proj": weights,
        },
        "experts": {"normed": row, "gate_up_proj": stacked, "gated": row, "down_proj": stacked},
    }  # fmt: skip


def _int8(
    name: str, layers: Mapping[str, Table], activations: str, method: str, ends: Table = ENDS
) -> Recipe:
    details = {"weights": "int8", "activations": f"int8, {activations}", "method": method}
    return Recipe(name, 8, None, ends, layers, details)


W8A8 = _int8(
    "w8a8",
    {
        "mamba1": mamba1(x=PERCENTILE, y=HADAMARD),
        "mamba2": mamba2(x=PERCENTILE, y=HADAMARD),
        **_transformer(CAPPED_LLM_INT8, INT8_ROWS),
    },
    "static",
    "Quamba",
)

# as Quamba treats Jamba's attention and experts
W8A8_LLM_INT8 = _int8(
    "w8a8-llm-int8",
    {**W8A8.layers, **_transformer(LLM_INT8, INT8_ROWS)},
    "static; of attention and MLPs a scale a token",
    "Quamba, LLM.int8()",
    _STATIC_ENDS,
)


def _octav(table: Table) -> Table:
    """Return the table with OCTAV in place of every absmax and percentile.

    The paper names no sites: "a clipping optimization algorithm can be applied to Quamba" (section
    5.1) follows the sentence on the scales of all operators, so it is read as meaning all of them.
    xBC keeps absmax, because its histogram covers the whole and its scales cover parts. So do
    inputs with floating channels.
    """
    return {
        name: replace(how, clip="octav")
        if isinstance(how, Static) and how.outliers is None and name != "xBC"
        else how
        for name, how in table.items()
    }


W8A8_O = _int8("w8a8-o", {k: _octav(t) for k, t in W8A8.layers.items()}, "static", "Quamba-O")

_GROUPS = Static(groups=True)
W4A8 = Recipe(
    "w4a8",
    4,
    128,
    ENDS,
    {
        "mamba1": {**mamba1(x=PERCENTILE, y=HADAMARD), "in_proj": _W4_128, "out_proj": _W4_128},
        "mamba2": mamba2(x=_GROUPS, y=HADAMARD, BC=_GROUPS, big=_W4_128),
        **_transformer(CAPPED_LLM_INT8, _W4_128),
    },
    {
        "weights": "int4 with minimums; x_proj, dt_proj int8",
        "activations": "int8, static",
        "method": "Quamba2",
    },
)

# -- baselines of Quamba's paper ------------------------------------------------------------------

# SmoothQuant: a divisor per channel, α = 0.5
SMOOTH = Static(smooth=0.5)


def _uniform(inputs: Static) -> Layers:
    """Return tables that treat the inputs of all products the same."""
    return {
        "mamba1": mamba1(x=inputs, y=inputs, normed=inputs),
        "mamba2": mamba2(x=inputs, y=inputs, normed=inputs),
        **_transformer(inputs, INT8),
    }


def _dynamic(table: Table) -> Table:
    return {name: Dynamic() if isinstance(how, Activation) else how for name, how in table.items()}


_PLAIN = _uniform(ABSMAX)
STATIC = _int8("w8a8-static", _PLAIN, "static", "min-max", _STATIC_ENDS)
DYNAMIC = _int8(
    "w8a8-dynamic", {k: _dynamic(t) for k, t in _PLAIN.items()}, "a scale a token", "min-max"
)
# Smooths the inputs of products; Mamba-2's x is read by the scan alone. The head's input `final` is
# neither smoothed nor rotated, because its matrix may also be the embedding's table.
SMOOTHQUANT = _int8(
    "w8a8-smoothquant",
    {
        "mamba1": mamba1(x=SMOOTH, y=SMOOTH, normed=SMOOTH, low=SMOOTH),
        "mamba2": mamba2(x=ABSMAX, y=SMOOTH, normed=SMOOTH),
        **_transformer(SMOOTH, INT8),
    },
    "static",
    "SmoothQuant, α = 0.5",
    _STATIC_ENDS,
)
# QuaRot on Mamba: every input of a product is rotated online, including the norms' outputs, whose
# rotation QuaRot folds into the residual stream; x is rotated back before the scan.
ROTATED = _int8(
    "w8a8-hadamard", _uniform(HADAMARD), "static", "QuaRot: rotated online", _STATIC_ENDS
)

ALL = (
    FP32, FP16, W8, W4, W4A16, W8A8, W8A8_O, W8A8_LLM_INT8, W4A8, STATIC, DYNAMIC, SMOOTHQUANT,
    ROTATED,
)  # fmt: skip
