"""Statement of the elementwise product."""

from edge.ops import Op, value

MULTIPLY = Op(
    "Multiply",
    (value("x", "f32[...,D]", ""), value("z", "f32[...,D]", "")),
    (value("y", "f32[...,D]", ""),),
    (),
    "y = x · z",
    "GLU variants, arXiv 2002.05202, section 2 (bilinear)",
)
