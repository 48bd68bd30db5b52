"""Lower a bundle's graph to its launch plan: the walk over the nodes, and the lowerings' interface.

Needs onnx, but neither Triton nor torch. Each op's folder says how its kernels are launched.
"""
