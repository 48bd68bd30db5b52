"""Expand logits: from the ids that a head computes to a whole vocabulary."""
