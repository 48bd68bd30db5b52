"""Selection of the largest logits of a row, on the device."""
