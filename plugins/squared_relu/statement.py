"""Squared ReLU."""

from edge.ops import Op, value

SQUARED_RELU = Op(
    "SquaredRelu",
    (value("x", "f32[...,D]", "activations"),),
    (value("y", "f32[...,D]", ""),),
    (),
    "y = max(x, 0)²",
    "Primer, arXiv 2109.08668, section 4.2",
)
