"""ONNX function bodies of GELU."""

from __future__ import annotations

GELU = """
    y = Gelu<approximate="none">(x)
"""

GELU_TANH = """
    y = Gelu<approximate="tanh">(x)
"""
