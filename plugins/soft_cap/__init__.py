"""Soft cap."""
