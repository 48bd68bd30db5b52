"""Quantization to int8 and back."""
