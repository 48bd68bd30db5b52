"""RMSNorm and LayerNorm, with or without an addition before and quantization after them."""
