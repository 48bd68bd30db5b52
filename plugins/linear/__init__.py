"""Products with weights in fp32, fp16, int8, int4, and blocks of 8 or 4 bits."""
