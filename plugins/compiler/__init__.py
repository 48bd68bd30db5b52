"""Kernels become cubins: in worker processes, cached by content, read back without CUDA tools.

Nothing here imports Triton but the workers, so a parent may interpret kernels, or have no Triton.
"""
