"""Causal depthwise convolution with state and SiLU, fp32 and int8, alone or fused to a product."""
