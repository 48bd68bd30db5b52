"""Quantize weights, and derive the scales of activations from calibration statistics."""
