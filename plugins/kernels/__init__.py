"""What the ops' Triton kernels have in common: arithmetic, and state that is kept between runs.

A kernel is imported either to be interpreted on a CPU (`TRITON_INTERPRET=1` before Triton's first
import: tests and `EDGE_DEVICE=interpret`) or to be compiled ahead of time (`compile`).
"""
