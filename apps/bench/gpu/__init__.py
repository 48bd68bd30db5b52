"""The CUDA engine measured: `tests/gpu/run.sh` on a machine with a GPU.

Models have the published sizes and random weights: one period of different layers, repeated, so
that a model of sixty-four layers is made in seconds and read from memory like any other.
"""
