"""ONNX function body of the elementwise product."""

MULTIPLY = """
    y = Mul(x, z)
"""
