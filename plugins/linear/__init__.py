"""Products with a weight: fp32 and fp16, int8, int4, and blocks of 8 or 4 bits."""
