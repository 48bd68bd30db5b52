"""The ONNX function body of the product."""

MULTIPLY = """
    y = Mul(x, z)
"""
