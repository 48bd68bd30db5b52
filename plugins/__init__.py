"""Implementations of the ops: plain references here, kernels and TensorRT plugins as they land."""
