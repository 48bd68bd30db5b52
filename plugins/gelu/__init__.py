"""GELU, exact and by tanh."""
