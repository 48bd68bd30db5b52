"""Each op in plain PyTorch: sequential and obvious, the truth every other face is tested against.

Shapes use the symbols of `edge.config`. Every stateful op takes the state before the first token
and returns the state after the last one; T is any length, and one call of T tokens means the same
as T calls of one.
"""

from edge.plugins.reference.attention import attention, rope
from edge.plugins.reference.conv import causal_conv1d
from edge.plugins.reference.hadamard import hadamard
from edge.plugins.reference.linear_int8 import (
    linear_int4,
    linear_int4_quantize,
    linear_int8,
    linear_int8_quantize,
)
from edge.plugins.reference.norm import gated_rms_norm, layer_norm, rms_norm
from edge.plugins.reference.quantize import (
    dequantize,
    embed_int8,
    fake_quantize,
    fake_quantize_rows,
    gated_rms_norm_int8,
    quantize,
    quantize_rows,
    rms_norm_quantize,
)
from edge.plugins.reference.quantized_recurrent import (
    causal_conv1d_int8,
    selective_scan_heads_int8,
    selective_scan_int8,
)
from edge.plugins.reference.scan import selective_scan, selective_scan_heads

__all__ = [
    "attention",
    "causal_conv1d",
    "causal_conv1d_int8",
    "dequantize",
    "embed_int8",
    "fake_quantize",
    "fake_quantize_rows",
    "gated_rms_norm",
    "gated_rms_norm_int8",
    "hadamard",
    "layer_norm",
    "linear_int4",
    "linear_int4_quantize",
    "linear_int8",
    "linear_int8_quantize",
    "quantize",
    "quantize_rows",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "selective_scan",
    "selective_scan_heads",
    "selective_scan_heads_int8",
    "selective_scan_int8",
]
