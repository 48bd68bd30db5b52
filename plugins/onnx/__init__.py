"""ONNX function bodies of the ops in `edge.ops`, so that any ONNX runtime can run the graph."""

from edge.ops.variants import variants
from edge.plugins.onnx.library import FLAVOURS, OPSETS, Flavour, function, model_of, names, op_of

__all__ = ["FLAVOURS", "OPSETS", "Flavour", "function", "model_of", "names", "op_of", "variants"]
