"""Causal depthwise convolution with state, then SiLU: fp32 and int8, alone or after a product."""
