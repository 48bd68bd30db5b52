"""Orthonormal Hadamard rotations, with or without quantization after them."""
