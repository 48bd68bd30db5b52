"""Rounding to int8 and back."""
