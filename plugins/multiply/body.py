"""The ONNX function body of the product."""

from __future__ import annotations

MULTIPLY = """
    y = Mul(x, z)
"""
