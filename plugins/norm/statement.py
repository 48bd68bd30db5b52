"""Statements of norms over the last axis, of a value or a sum, with or without quantization."""

from edge.ops import Attribute, Op, value, weight
from edge.plugins.quantize.statement import ROUND

_X = value("x", "f32[...,D]", "activations")

_EPS = Attribute("eps", "float", "added to the mean square (variance, for LayerNorm)")

RMS_NORM = Op(
    "RMSNorm",
    (_X, weight("weight", "f32[D]", "")),
    (value("y", "f32[...,D]", "normed"),),
    (_EPS,),
    "y = weight · x / sqrt(mean(x²) + eps)",
    "Root mean square layer normalization, arXiv 1910.07467, equation 4",
)

ADD_RMS_NORM = Op(
    "AddRMSNorm",
    (
        value("x", "f32[...,D]", "residual stream"),
        value("added", "f32[...,D]", "output of the last mixer"),
        weight("weight", "f32[D]", ""),
    ),
    (value("y", "f32[...,D]", "normed sum"), value("sum", "f32[...,D]", "the new residual stream")),
    (_EPS,),
    "sum = x + added\ny = weight · sum / sqrt(mean(sum²) + eps)",
    "mamba_ssm/ops/triton/layer_norm.py (prenorm, residual in fp32)",
)

LAYER_NORM = Op(
    "LayerNorm",
    (_X, weight("weight", "f32[D]", ""), weight("bias", "f32[D]", "")),
    (value("y", "f32[...,D]", "normed"),),
    (_EPS,),
    "y = weight · (x - mean(x)) / sqrt(var(x) + eps) + bias",
    "Layer normalization, arXiv 1607.06450",
)

ADD_LAYER_NORM = Op(
    "AddLayerNorm",
    (*ADD_RMS_NORM.inputs, weight("bias", "f32[D]", "")),
    ADD_RMS_NORM.outputs,
    (_EPS,),
    "sum = x + added\ny = weight · (sum - mean(sum)) / sqrt(var(sum) + eps) + bias",
    "mamba_ssm/ops/triton/layer_norm.py (prenorm, residual in fp32)",
)

_NORM_SCALE = weight("scale", "f32[1|D]", "scale of y")

_NORMED = value("y", "i8|u8[...,D]", "normed, then quantized")

_NORM_ROUND = ROUND.format("weight · {0} / sqrt(mean({0}²) + eps) / scale")

RMS_NORM_QUANTIZE = Op(
    "RMSNormQuantize",
    (*RMS_NORM.inputs, _NORM_SCALE),
    (_NORMED,),
    RMS_NORM.attributes,
    f"y = {_NORM_ROUND.format('x')}",
    "RMSNorm, then Quantize: Quamba, arXiv 2410.13229, section 4.3",
)

ADD_RMS_NORM_QUANTIZE = Op(
    "AddRMSNormQuantize",
    (*ADD_RMS_NORM.inputs, _NORM_SCALE),
    (_NORMED, ADD_RMS_NORM.outputs[1]),
    ADD_RMS_NORM.attributes,
    f"sum = x + added\ny = {_NORM_ROUND.format('sum')}",
    "AddRMSNorm, then Quantize: Quamba, arXiv 2410.13229, section 4.3",
)
