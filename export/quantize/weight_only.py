"""Recipes that round weights and leave activations floating.

Norms, convolutions, biases, A, D and dt_bias stay fp32: they are small and steer the recurrence.
`x_proj` and `dt_proj` make Δ, B and C, the quantities an SSM is most sensitive to (Quamba, arXiv
2410.13229, section 4.1), and together are 4 % of a Mamba-1 layer: `dt_proj` stays fp32, `x_proj`
keeps 8 bits.
"""

from __future__ import annotations

from edge.export.quantize.how import Table, blocks
from edge.export.quantize.plan import F16, Storage
from edge.export.quantize.recipes import LayerKind, Recipe


def _layers(most: Storage, x_proj: Storage) -> dict[LayerKind, Table]:
    return {
        "mamba1": {"in_proj": most, "x_proj": x_proj, "out_proj": most},
        "mamba2": {"in_proj": most, "out_proj": most},
        "attention": {"qkv_proj": most, "o_proj": most},
        "mlp": {"gate_up_proj": most, "down_proj": most},
    }


FP32 = Recipe("fp32", 32, None, {}, {})

FP16 = Recipe(
    "fp16",
    16,
    None,
    {"embedding": F16, "head": F16},
    _layers(most=F16, x_proj=F16),
    {"activations": "fp32"},
)

W8 = Recipe(
    "w8",
    8,
    128,
    {"embedding": blocks(8, 128), "head": blocks(8, 128)},
    _layers(most=blocks(8, 128), x_proj=blocks(8, 128)),
    {"weights": "int8, absmax", "activations": "fp32"},
)

W4 = Recipe(
    "w4",
    4,
    32,
    {"embedding": blocks(4, 32), "head": blocks(4, 32)},
    _layers(most=blocks(4, 32), x_proj=blocks(8, 128)),
    {"weights": "int4, least squares; x_proj int8", "activations": "fp32"},
)

# "in groups of 128 for the big projections", as Quamba2 keeps weights in 4 bits; calibrated, GPTQ
# rounds them. `dt_proj` stays 16 bits wide, as in Quamba2's code.
_GROUPS = _layers(most=blocks(4, 128), x_proj=blocks(8, 128))

W4A16 = Recipe(
    "w4a16",
    4,
    128,
    {"embedding": blocks(8, 128), "head": blocks(8, 128)},
    _GROUPS | {"mamba1": dict(_GROUPS["mamba1"]) | {"dt_proj": F16}},
    {"weights": "int4; x_proj, embedding, head int8", "activations": "fp32"},
)

ALL = (FP32, FP16, W8, W4, W4A16)
