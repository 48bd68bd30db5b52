"""Mixture of experts: routing, products with the chosen experts, and their weighted sum."""
