"""Constrained answers: tokens outside a grammar are never sampled."""
