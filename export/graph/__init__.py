"""From canonical weights to `graphs/ort.onnx` and `weights.bin`."""

from edge.export.graph.builder import TensorSource
from edge.export.graph.model import GRAPH_FILE, WEIGHT_FILE, BuiltGraph, build_graph

__all__ = ["GRAPH_FILE", "WEIGHT_FILE", "BuiltGraph", "TensorSource", "build_graph"]
