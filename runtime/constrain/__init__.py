"""Answers that cannot be wrongly formed: tokens outside a grammar are never sampled."""
