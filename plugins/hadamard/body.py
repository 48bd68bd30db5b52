"""ONNX function bodies of the rotations."""

from edge.plugins.quantize.body import TO_S8, TO_U8

# Only the first and the last Reshape depend on x; ONNX Runtime folds the grid's shape at load.
_ROTATION = """
    rows = Constant<value = int64[1] {-1}>()
    slow_size = Shape<end=1>(slow)
    fast_size = Shape<end=1>(fast)
    grid_shape = Concat<axis=0>(rows, slow_size, fast_size)
    grid = Reshape(x, grid_shape)
    mixed = MatMul(grid, fast)
    turned = MatMul(slow, mixed)
    shape = Shape(x)
    %(y)s = Reshape(turned, shape)
"""

HADAMARD = _ROTATION % {"y": "y"}

HADAMARD_QUANTIZE = _ROTATION % {"y": "rotated"} + TO_S8 % {"x": "rotated"}

ORT_HADAMARD_QUANTIZE = _ROTATION % {"y": "rotated"} + TO_U8 % {"x": "rotated"}
