"""Statements of orthonormal rotations of the last axis, with or without quantization."""

from edge.ops import Op, value, weight
from edge.plugins.quantize.statement import ROUND

_ROTATED = (
    value("x", "f32[...,n]", "n = p·q"),
    weight("slow", "f32[p,p]", "orthonormal"),
    weight("fast", "f32[q,q]", "orthonormal"),
)

_ROTATION = "X = reshape(x, [p, q])\nr = reshape(slow · X · fast, [n])"

HADAMARD = Op(
    "Hadamard",
    _ROTATED,
    (value("y", "f32[...,n]", "rotated; y·y = x·x"),),
    (),
    f"{_ROTATION}\ny = r = (slow ⊗ fastᵀ) · x",
    "Quamba, arXiv 2410.13229, section 4.2; QuaRot, arXiv 2404.00456, section 3",
)

HADAMARD_QUANTIZE = Op(
    "HadamardQuantize",
    (*_ROTATED, weight("scale", "f32[1|n]", "scale of y")),
    (value("y", "i8|u8[...,n]", "rotated, then quantized"),),
    (),
    f"{_ROTATION}\ny = {ROUND.format('r / scale')}",
    "Hadamard, then Quantize: Quamba, arXiv 2410.13229, section 4.3",
)
