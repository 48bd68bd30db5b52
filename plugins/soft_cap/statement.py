"""Soft cap: a smooth bound on values."""

from edge.ops import Attribute, Op, value

SOFT_CAP = Op(
    "SoftCap",
    (value("x", "f32[...,D]", "logits"),),
    (value("y", "f32[...,D]", ""),),
    (Attribute("cap", "float", "the bound, above 0"),),
    "y = cap · tanh(x / cap)",
    "Gemma 2, arXiv 2408.00118, section 2",
)
