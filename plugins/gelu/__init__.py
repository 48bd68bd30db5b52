"""GELU, exact and with the tanh approximation."""
