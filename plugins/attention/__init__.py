"""Causal attention over a KV cache that is written in place."""
