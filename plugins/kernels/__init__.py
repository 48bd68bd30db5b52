"""Functions shared by the ops' Triton kernels: arithmetic, and state that is kept between runs.

Kernels are either interpreted on a CPU (`TRITON_INTERPRET=1` before Triton's first import: tests
and `EDGE_DEVICE=interpret`) or compiled ahead of time (`edge.plugins.compiler`).
"""
