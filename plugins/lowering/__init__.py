"""Makes a bundle's launch plan of its graph: the walk over its nodes, and what lowerings see.

Needs onnx, and neither Triton nor torch. How each op's kernels are called is in its folder.
"""
