"""ONNX function bodies of the ops in `edge.ops`, so that any ONNX runtime can run the graph."""

from edge.plugins.onnx.library import FLAVOURS, OPSETS, Flavour, function, names, op_of, variants

__all__ = ["FLAVOURS", "OPSETS", "Flavour", "function", "names", "op_of", "variants"]
