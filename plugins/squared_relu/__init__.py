"""Squared ReLU."""
