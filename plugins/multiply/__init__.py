"""Elementwise product of two values."""
