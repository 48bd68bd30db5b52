"""Statements of quantization to int8 and back.

Quantization is symmetric, q = clip(round_half_even(x / scale), -128, 127), with fp32 scales; q
represents q · scale. A scale of [1|C] is one for all values, or one per channel of the last axis.

i8|u8: an int8 value that only products and scans read may be stored as u8 with 128 added. The
`ort` flavour of the ONNX functions does so, because u8 by s8 products are the fast ones on x86. The
results are the same. A value of type i8 alone is signed in every flavour.
"""

from __future__ import annotations

from edge.ops import Attribute, Op, Value, value, weight

_X = value("x", "f32[...,C]", "activations")

_SCALE = weight("scale", "f32[1|C]", "positive")

_Q = value("y", "i8|u8[...,C]", "quantized")

_FLOAT = value("y", "f32[...,C]", "x on the int8 grid")

ROUND = "clip(round_half_even({}), -128, 127)"

_ROW_SCALE = "scale = absmax(x) / 127 over the last axis, 1 where that is 0"

QUANTIZE = Op(
    "Quantize",
    (_X, _SCALE),
    (_Q,),
    (),
    f"y = {ROUND.format('x / scale')}",
    "ONNX QuantizeLinear; Quamba, arXiv 2410.13229, equation 3, rounding instead of truncating",
)

QUANTIZE_ROWS = Op(
    "QuantizeRows",
    (_X,),
    (_Q, value("scale", "f32[...,1]", "one per row, computed from x")),
    (),
    f"{_ROW_SCALE}\ny = {ROUND.format('x / scale')}",
    "dynamic quantization, one scale a token: LLM.int8(), arXiv 2208.07339, section 3.1",
)

SPLIT_QUANTIZE_ROWS = Op(
    "SplitQuantizeRows",
    (_X,),
    (*QUANTIZE_ROWS.outputs, value("outliers", "f32[...,C]", "x where not quantized, else 0")),
    (Attribute("threshold", "float", "minimum magnitude of an outlier"),),
    "outliers = x where |x| ≥ threshold, else 0\nscale, y = QuantizeRows(x - outliers)",
    "LLM.int8(), arXiv 2208.07339, section 3.2: mixed-precision decomposition",
)

DEQUANTIZE = Op(
    "Dequantize",
    (value("x", "i8[...,C]", "output of LinearInt8Quantize"), _SCALE),
    (_FLOAT,),
    (),
    "y = scale · x",
    "ONNX DequantizeLinear",
)

FAKE_QUANTIZE = Op(
    "FakeQuantize",
    (_X, _SCALE),
    (_FLOAT,),
    (),
    f"y = scale · {ROUND.format('x / scale')}",
    "Quantize, then Dequantize",
)

FAKE_QUANTIZE_ROWS = Op(
    "FakeQuantizeRows",
    (_X,),
    (_FLOAT,),
    (),
    f"{_ROW_SCALE}\ny = scale · {ROUND.format('x / scale')}",
    "QuantizeRows, then scale · y",
)


def scaled(name: str, channels: str, doc: str) -> tuple[Value, Value]:
    """Return an activation [T,B,channels] in int8, and its scale."""
    return (
        value(name, f"i8[T,B,{channels}]", doc),
        weight(f"{name}_scale", f"f32[1|{channels}]", f"q represents q·{name}_scale in {name}"),
    )


def constant(name: str, shape: str, scale: str, doc: str) -> tuple[Value, Value]:
    """Return a weight in int8, and its scale."""
    return (
        weight(name, f"i8[{shape}]", doc),
        weight(f"{name}_scale", f"f32[{scale}]", ""),
    )
