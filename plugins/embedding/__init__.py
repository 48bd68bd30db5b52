"""Rows of the embedding table, one a token."""
