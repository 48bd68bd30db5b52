"""Rotary embedding, and causal attention over a KV cache that is updated in place."""
