"""The ONNX function body of squared ReLU."""

from __future__ import annotations

SQUARED_RELU = """
    positive = Relu(x)
    y = Mul(positive, positive)
"""
