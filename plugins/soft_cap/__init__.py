"""Soft cap: a smooth bound on values."""
