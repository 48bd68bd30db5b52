"""ONNX function bodies of quantization to int8 and back.

TensorRT reads the bodies of standard ops: signed QuantizeLinear and DequantizeLinear, with every
int8 constant feeding a DequantizeLinear directly, as TensorRT requires. A scale of one value is
[1], which ONNX Runtime, ONNX's own evaluator and TensorRT apply to the whole tensor, regardless of
the axis.
"""

from __future__ import annotations

from string import Template

ZERO = "    zero = Constant<value = uint8 {128}>()\n"

ONE = "    one = Constant<value = float {1.0}>()\n"

TO_S8 = "    y = QuantizeLinear<axis=-1, output_dtype: int=3>(%(x)s, scale)\n"

# ONNX Runtime's per-channel QuantizeLinear is scalar: 4 ms for 128 × 1536, against 70 µs for
# dividing first. A single scale needs no division. The If is resolved when the model is loaded.
TO_U8 = (
    ZERO
    + """
    scale_count = Size(scale)
    single = Constant<value = int64 {1}>()
    is_single = Equal(scale_count, single)
    y = If(is_single) <
      then_branch = whole () => (uint8[] whole_y) {
        whole_y = QuantizeLinear(%(x)s, scale, zero)
      },
      else_branch = channels () => (uint8[] channels_y) {
        unit_scale = Constant<value = float {1.0}>()
        scaled = Div(%(x)s, scale)
        channels_y = QuantizeLinear(scaled, unit_scale, zero)
      }>
"""
)

QUANTIZE = TO_S8 % {"x": "x"}

ORT_QUANTIZE = TO_U8 % {"x": "x"}

_ROW_SCALE = """
    last = Constant<value = int64[1] {-1}>()
    size = Abs(%(x)s)
    largest = ReduceMax<keepdims=1>(size, last)
    steps = Constant<value = float {127.0}>()
    found = Div(largest, steps)
    nothing = Constant<value = float {0.0}>()
    is_zero = Equal(found, nothing)
    one = Constant<value = float {1.0}>()
    scale = Where(is_zero, one, found)
    scaled = Div(%(x)s, scale)
"""

_ROUND = """
    rounded = Round(scaled)
    lowest = Constant<value = float {-128.0}>()
    highest = Constant<value = float {127.0}>()
    grid = Clip(rounded, lowest, highest)
"""

_ROWS = _ROW_SCALE + "    y = QuantizeLinear<output_dtype: int=3>(scaled, one)\n"

_ORT_ROWS = _ROW_SCALE + ZERO + "    y = QuantizeLinear(scaled, one, zero)\n"

QUANTIZE_ROWS, ORT_QUANTIZE_ROWS = _ROWS % {"x": "x"}, _ORT_ROWS % {"x": "x"}

_SPLIT = """
    threshold = Constant<value_float: float = @threshold>()
    magnitude = Abs(x)
    none = Constant<value = float {0.0}>()
    large = GreaterOrEqual(magnitude, threshold)
    outliers = Where(large, x, none)
    small = Where(large, none, x)
"""

SPLIT_QUANTIZE_ROWS = _SPLIT + _ROWS % {"x": "small"}

ORT_SPLIT_QUANTIZE_ROWS = _SPLIT + _ORT_ROWS % {"x": "small"}

DEQUANTIZE = "    y = DequantizeLinear<axis=-1>(x, scale)\n"

# Per-channel DequantizeLinear is 5 times slower than this.
ORT_DEQUANTIZE = """
    wide = Cast<to=1>(x)
    y = Mul(wide, scale)
"""

FAKE_QUANTIZE = """
    q = QuantizeLinear<axis=-1, output_dtype: int=3>(x, scale)
    y = DequantizeLinear<axis=-1>(q, scale)
"""

ORT_FAKE_QUANTIZE = "    scaled = Div(x, scale)\n" + _ROUND + "    y = Mul(grid, scale)\n"

FAKE_QUANTIZE_ROWS = _ROW_SCALE % {"x": "x"} + _ROUND + "    y = Mul(grid, scale)\n"

# -- for int8 bodies that dequantize and continue as the float ones --------------------------------

STEPS_AND_ZEROS = """
    single = Constant<value = int64 {1}>()
    one_step = Constant<value = float {1.0}>()
    zero_u8 = Constant<value = uint8 {128}>()
    zero_s8 = Constant<value = int8 {0}>()
"""

_WIDE = Template("""
    ${name}_float = Cast<to=1>($name)
    ${name}_wide = Mul(${name}_float, $scale)
""")


def widened_constants(ort: bool, *names: str) -> str:
    """Return nodes that make `{name}_wide`, in fp32, of each int8 constant.

    When it loads a model, ONNX Runtime folds Cast and Mul of constants, but not DequantizeLinear.
    """
    if not ort:
        return "".join(
            f"    {name}_wide = DequantizeLinear<axis=-1>({name}, {name}_scale)\n" for name in names
        )
    return "".join(_WIDE.substitute(name=name, scale=f"{name}_scale") for name in names)
