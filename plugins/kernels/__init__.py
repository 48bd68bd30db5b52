"""The ops as Triton kernels, one idea a file.

A kernel is imported either to be interpreted on a CPU (`TRITON_INTERPRET=1` before Triton's first
import: tests and `EDGE_DEVICE=interpret`) or to be compiled ahead of time (`compile`). How each is
called is in `edge.plugins.lowering`.
"""
