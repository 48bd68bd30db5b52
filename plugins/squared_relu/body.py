"""ONNX function body of squared ReLU."""

SQUARED_RELU = """
    positive = Relu(x)
    y = Mul(positive, positive)
"""
