"""ONNX function bodies of the ops, so that any ONNX runtime can run the graph."""

from edge.plugins.onnx.library import (
    FLAVOURS,
    OPSETS,
    Flavour,
    function,
    inputs_of,
    model_of,
    names,
    op_of,
)

__all__ = ["FLAVOURS", "OPSETS", "Flavour", "function", "inputs_of", "model_of", "names", "op_of"]
