"""ONNX function body of expanding logits: column -1 is the last, that of the smallest."""

EXPAND_LOGITS = """
    axes = Constant<value_ints: ints = [-1]>()
    least = ReduceMin<keepdims: int = 1>(x, axes)
    columns = Concat<axis: int = -1>(x, least)
    y = Gather<axis: int = -1>(columns, index)
"""
