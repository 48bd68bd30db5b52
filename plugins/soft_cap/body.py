"""ONNX function body of the soft cap."""

SOFT_CAP = """
    bound = Constant<value_float: float = @cap>()
    share = Div(x, bound)
    bounded = Tanh(share)
    y = Mul(bounded, bound)
"""
