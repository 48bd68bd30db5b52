"""Bodies of the int8 convolution and scans, in the ONNX text syntax.

An int8 body dequantizes and goes on as the float body does (`edge.plugins.onnx.recurrent`). What
is computed from constants alone, ONNX Runtime computes when it loads the model; for that `ort`
dequantizes them by Cast and Mul, which it folds, not by DequantizeLinear, which it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

from edge.plugins.onnx.recurrence import Step, walks
from edge.plugins.onnx.recurrent import (
    EVERY,
    OWN,
    STEP,
    Heads,
    causal_conv1d,
    selective_scan,
    selective_scan_heads,
    start_heads,
    steps_of_heads,
)

_SUFFIX = "_wide"  # what a value is called once it is fp32

_A = """
    A_size = Exp(A_log_wide)
    A = Neg(A_size)
"""

_FLOAT = Template("""
    ${name}_float = Cast<to=1>($name)
    ${name}_wide = Mul(${name}_float, $scale)
""")

_CONSTANT = "    {name}_wide = DequantizeLinear<axis=-1>({name}, {name}_scale)\n"


def _constants(ort: bool, *names: str) -> str:
    """`{name}_wide` of each constant."""
    if not ort:
        return "".join(_CONSTANT.format(name=name) for name in names)
    return "".join(_FLOAT.substitute(name=name, scale=f"{name}_scale") for name in names)


# One node for a value with one scale, two for one with a scale a channel: for 1536 numbers those
# take 2.3 µs, where DequantizeLinear by channel takes 3.4. Which it is, is settled at load.
_ORT_FLOAT = Template("""
    ${name}_count = Size($scale)
    ${name}_single = Equal(${name}_count, single)
    ${name}_wide = If(${name}_single) <
      then_branch = whole () => (float[] ${name}_whole) {
        ${name}_whole = DequantizeLinear($name, $scale, $zero)
      },
      else_branch = channels () => (float[] ${name}_channels) {
        ${name}_whole_steps = DequantizeLinear($name, one_step, $zero)
        ${name}_channels = Mul(${name}_whole_steps, $scale)
      }>
""")

_STEPS_AND_ZEROS = """
    single = Constant<value = int64 {1}>()
    one_step = Constant<value = float {1.0}>()
    zero_u8 = Constant<value = uint8 {128}>()
    zero_s8 = Constant<value = int8 {0}>()
"""

# -- convolution -----------------------------------------------------------------------------------

_CONV_WIDEN = """
    weight_of_steps = Mul(weight_wide, x_scale)
    windows_wide = Cast<to=1>(windows)
"""

# QuantizeLinear by channel takes 30 µs for 1536 numbers, dividing first 3, and one scale needs no
# division.
_QUANTIZE = """
    steps = Div(y_wide, y_scale)
    y = QuantizeLinear(steps, one_step, zero_s8)
"""
_ORT_QUANTIZE = """
    y_count = Size(y_scale)
    y_single = Equal(y_count, single)
    y = If(y_single) <
      then_branch = whole () => (uint8[] y_whole) {
        y_whole = QuantizeLinear(y_wide, y_scale, zero_u8)
      },
      else_branch = channels () => (uint8[] y_channels) {
        steps = Div(y_wide, y_scale)
        y_channels = QuantizeLinear(steps, one_step, zero_u8)
      }>
"""


def _conv(ort: bool) -> str:
    widen = _constants(ort, "weight", "bias") + _CONV_WIDEN
    text = causal_conv1d("y_wide", "windows_wide", "weight_of_steps", "bias_wide", widen)
    return _STEPS_AND_ZEROS + text + (_ORT_QUANTIZE if ort else _QUANTIZE)


# -- scans -----------------------------------------------------------------------------------------

# How a state is kept. One of int8 is counted in steps of state_scale, which B is divided and C
# multiplied by: keeping it is then rounding alone, whatever the scale's shape.
_KEEP = {16: "Cast<to=10>(h)", 8: "QuantizeLinear(h, one_step, zero_s8)"}


def _rounded(token: str, state_bits: int, rows: Mapping[str, str], state: str, read: str) -> Step:
    """`token` goes from `wide`, the state in fp32, to `h` and `read_t`."""
    kept = f"""
            wide = Cast<to=1>({{before}}){token}
            after = {_KEEP[state_bits]}"""
    return Step(kept, rows, state, read)


_TOKEN = """
            exponent = Mul({delta4}, A)
            decay = Exp(exponent)
            fed = Mul({scaled4}, {B4})
            faded = Mul(decay, wide)
            h = Add(faded, fed)
            read_t = MatMul({C4}, h)"""
_STATE_STEPS = """
    along_axis = Constant<value = int64[1] {-1}>()
    state_steps = Reshape(state_scale, along_axis)
    B_steps = Div(B_scale, state_steps)
    C_steps = Mul(C_scale, state_steps)
"""


def _widened(ort: bool, scales: Mapping[str, str]) -> str:
    """Activations, by name and scale, in fp32."""
    text = ""
    for name, scale in scales.items():
        zero = "zero_s8" if name in ("dt", "dt_all", "z") else "zero_u8"
        text += (_ORT_FLOAT if ort else _FLOAT).substitute(name=name, scale=scale, zero=zero)
    return text


def _rates_and_constants(ort: bool) -> str:
    """A, D and dt_bias in fp32."""
    return _constants(ort, "A_log", "D", "dt_bias") + _A


def _scan(state_bits: int, ort: bool) -> str:
    scales = {name: f"{name}_scale" for name in ("x", "dt", "B", "C", "z")}
    text = _STEPS_AND_ZEROS
    if state_bits == 8:
        text += _STATE_STEPS
        scales |= {"B": "B_steps", "C": "C_steps"}
    step = STEP
    if state_bits != 32:
        step = _rounded(_TOKEN, state_bits, STEP.rows, STEP.state, STEP.read)
    text += _widened(ort, scales) + _rates_and_constants(ort)
    return text + selective_scan(_SUFFIX, step, state_bits)


_HEADS_ROWS = {"decay": "B,H,1,1", "scaled": "B,H,P,1", "B_in": "B,G,1,N", "C_out": "B,G,N,1"}
_HEADS_TOKEN = """
            faded = Mul(wide, {decay})
            fed = MatMul({scaled}, {B_in})
            h = Add(faded, fed)
            read_t = MatMul(h, {C_out})"""
# `cube` gives a scale [1] the axes of one by head, [H,1,N].
_IN_AND_OUT = {
    16: Template("""
    B_in = Identity($B_rows)
    C_out = Identity($C_columns)
"""),
    8: Template("""
    cube = Constant<value = float[1,1,1] {1.0}>()
    scale_rows = Mul(state_scale, cube)
    scale_columns = Transpose<perm=[0, 2, 1]>(scale_rows)
    B_in = Div($B_rows, scale_rows)
    C_out = Mul($C_columns, scale_columns)
"""),
}
_HEADS_END = """
    sum = Add(reads, skip)
    y = Reshape(sum, flat)
"""


def _token_by_token(state_bits: int, one_group: bool, own: Heads) -> str:
    """Mamba-2's scan with a state that is rounded after every token."""
    steps, by_head = steps_of_heads(one_group, own)
    in_and_out = _IN_AND_OUT[state_bits].substitute(by_head)
    step = _rounded(_HEADS_TOKEN, state_bits, _HEADS_ROWS, state="B,H,P,N", read="B,H,P,1")
    start = start_heads(one_group, own.names) + steps + in_and_out
    return start + walks(step, state_bits) + _HEADS_END


def _heads(ort: bool, read: Mapping[str, str]) -> Heads:
    """The activations that `read` has for x, dt, B and C, and the constants."""
    nodes = _widened(ort, {name: f"{of}_scale" for of, name in read.items()})
    names = {of: name + _SUFFIX for of, name in {**read, "D": "D", "dt_bias": "dt_bias"}.items()}
    return Heads(nodes, names)


def _scan_heads(state_bits: int, one_group: bool, ort: bool) -> str:
    """Logs are looked at when the state is not rounded."""
    text, own = _STEPS_AND_ZEROS + _rates_and_constants(ort), _heads(ort, OWN)
    if state_bits != 32:
        return text + _token_by_token(state_bits, one_group, own)
    return text + selective_scan_heads(one_group, own, _heads(ort, EVERY))


def _bodies(ort: bool) -> dict[str, str]:
    """Function name → body."""
    bodies = {"CausalConv1dInt8": _conv(ort)}
    for bits in (32, 16, 8):
        bodies[f"SelectiveScanInt8_{bits}"] = _scan(bits, ort)
        for one_group, suffix in ((False, ""), (True, "_1")):
            name = f"SelectiveScanHeadsInt8_{bits}{suffix}"
            bodies[name] = _scan_heads(bits, one_group, ort)
    return bodies


# function name → body of standard ops, and what ONNX Runtime does faster, where it differs
BODIES: dict[str, str] = _bodies(ort=False)
ORT_BODIES: dict[str, str] = _bodies(ort=True)
