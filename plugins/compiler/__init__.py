"""Compile kernels to cubins in worker processes, with a cache; read cubins without CUDA tools.

Only workers compile with Triton, so their parent may interpret kernels or have no Triton at all.
"""
