"""Statements of the gated norm of Mamba-2, with a gate in fp32 or int8, the SiLU gate of an MLP,
and the sigmoid gates of attention, one per value or one per head.
"""

from dataclasses import replace

from edge.ops import Attribute, Op, value, weight

GATED_RMS_NORM = Op(
    "GatedRMSNorm",
    (
        value("x", "f32[T,B,D]", "output of the scan"),
        value("z", "f32[T,B,D]", "gate"),
        weight("weight", "f32[D]", ""),
    ),
    (value("y", "f32[T,B,D]", "normed"),),
    (
        Attribute("eps", "float", "added to the mean square"),
        Attribute("groups", "int", "the mean square is over D/groups values", (None, 1)),
    ),
    "g = x · z · sigmoid(z)\ny = weight · g / sqrt(mean_group(g²) + eps)",
    "Mamba-2, arXiv 2405.21060, section 7.1; mamba_ssm layernorm_gated, norm_before_gate=False",
)

GATED_RMS_NORM_INT8 = Op(
    "GatedRMSNormInt8",
    (
        *GATED_RMS_NORM.only("x"),
        value("z", "i8[T,B,D]", "gate"),
        weight("z_scale", "f32[1|D]", "scale of z"),
        *GATED_RMS_NORM.only("weight"),
    ),
    GATED_RMS_NORM.outputs,
    GATED_RMS_NORM.attributes,
    "gate = z_scale · z\ng = x · gate · sigmoid(gate)\ny = weight · g / sqrt(mean_group(g²) + eps)",
    "Dequantize of the gate, then GatedRMSNorm",
)

SILU_GATE = Op(
    "SiluGate",
    (value("x", "f32[...,D]", "gated"), value("z", "f32[...,D]", "gate")),
    (value("y", "f32[...,D]", ""),),
    (),
    "y = x · z · sigmoid(z)",
    "GLU variants, arXiv 2002.05202, equation 5 (SwiGLU)",
)

SIGMOID_GATE = replace(
    SILU_GATE,
    name="SigmoidGate",
    maths="y = x · sigmoid(z)",
    source="GLU variants, arXiv 2002.05202, equation 3; Gated Attention, arXiv 2505.06708",
)

HEAD_GATE = Op(
    "HeadGate",
    (
        value("x", "f32[T,B,H·P]", "output of the attention heads"),
        value("z", "f32[T,B,H]", "gate of each head"),
    ),
    (value("y", "f32[T,B,H·P]", ""),),
    (Attribute("heads", "int", "H"),),
    "y[h] = x[h] · sigmoid(z[h])",
    "Gated Attention, arXiv 2505.06708, section 2.3 (headwise)",
)
