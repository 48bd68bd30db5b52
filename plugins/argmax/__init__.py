"""The best tokens of a row of logits, found on the device."""
