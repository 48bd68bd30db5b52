"""ONNX's own ops where a graph has them: what runs them."""
