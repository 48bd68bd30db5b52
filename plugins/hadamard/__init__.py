"""Orthonormal Hadamard rotations, alone or with the rounding behind them."""
