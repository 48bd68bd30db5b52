"""Build `graphs/ort.onnx` and `weights.bin` from canonical weights."""

from edge.export.graph.model import GRAPH_FILE, WEIGHT_FILE, BuiltGraph, build_graph
from edge.export.nodes.builder import TensorSource

__all__ = ["GRAPH_FILE", "WEIGHT_FILE", "BuiltGraph", "TensorSource", "build_graph"]
