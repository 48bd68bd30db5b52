"""ONNX function bodies of GELU."""

GELU = """
    y = Gelu<approximate="none">(x)
"""

GELU_TANH = """
    y = Gelu<approximate="tanh">(x)
"""
