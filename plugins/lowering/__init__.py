"""From a bundle's graph to its launch plan: each op's kernel, arguments and grid.

Needs onnx, and neither Triton nor torch: what is written here is how kernels are called. The
kernels themselves are in `edge.plugins.kernels`, one file here for each there.
"""
