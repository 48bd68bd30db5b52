"""Measure the CUDA engine: `tests/gpu/run.sh` on a machine with a GPU.

Models have published sizes and random weights. One period of distinct layers is repeated, so that
a model of 64 layers is made in seconds, yet is read from memory like any other.
"""
