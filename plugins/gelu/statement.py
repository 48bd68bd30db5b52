"""GELU, exact and with the tanh approximation."""

from edge.ops import Op, value

GELU = Op(
    "Gelu",
    (value("x", "f32[...,D]", "activations"),),
    (value("y", "f32[...,D]", ""),),
    (),
    "y = x/2 · (1 + erf(x/√2))",
    "Gaussian error linear units, arXiv 1606.08415, section 2",
)

GELU_TANH = Op(
    "GeluTanh",
    (value("x", "f32[...,D]", "activations"),),
    (value("y", "f32[...,D]", ""),),
    (),
    "y = x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))",
    "Gaussian error linear units, arXiv 1606.08415, section 2: the approximation",
)
