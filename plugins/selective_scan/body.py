"""ONNX function bodies of Mamba-1's scan.

An int8 body dequantizes and continues as the float body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Template

from edge.plugins.quantize.body import STEPS_AND_ZEROS, widened_constants
from edge.plugins.selective_scan.recurrence import Step, walks

# softplus from ops that are vectorized everywhere: max(v, 0) + log1p(exp(-|v|)), with
# log1p(u) = log(w) + (u - (w - 1)) for w = 1 + u <= 2; the second term restores the rounding of w.
# ONNX Runtime's Softplus calls log1p for each number: 11 ns each, against 3 ns for all of these.
# Mamba-2 has one number per head, not per channel: there Softplus, nine nodes fewer, is faster.
SOFTPLUS = """
    one = Constant<value = float {1.0}>()
    size = Abs(shifted)
    below = Neg(size)
    u = Exp(below)
    w = Add(u, one)
    log_w = Log(w)
    added = Sub(w, one)
    lost = Sub(u, added)
    above = Relu(shifted)
    positive = Sum(above, log_w, lost)
"""

# One token of Mamba-1, computed entirely from its few rows. With the exponential hoisted out of the
# loop, arrays of [T,B,N,E] do not fit the cache, and the scan is half as fast.
STEP = Step(
    """
            exponent = Mul({delta4}, A)
            decay = Exp(exponent)
            fed = Mul({scaled4}, {B4})
            faded = Mul(decay, {before})
            after = Add(faded, fed)
            read_t = MatMul({C4}, after)""",
    {"delta4": "B,1,E", "scaled4": "B,1,E", "B4": "B,N,1", "C4": "B,1,N"},
    state="B,N,E",
    read="B,1,E",
)

# The same, with a B and a C per group of channels, which are expanded to all channels for one token
# at a time.
GROUPED = Step(
    """
            exponent = Mul({delta4}, A)
            decay = Exp(exponent)
            B_many = Expand({B4}, B_spread)
            B_each = Reshape(B_many, of_channels)
            fed = Mul({scaled4}, B_each)
            faded = Mul(decay, {before})
            after = Add(faded, fed)
            C_many = Expand({C4}, C_spread)
            C_each = Reshape(C_many, of_channels)
            weighed = Mul(C_each, after)
            read_t = ReduceSum(weighed, rows_axis)""",
    {**STEP.rows, "B4": "B,N,G,1", "C4": "B,N,H,1"},
    state=STEP.state,
    read=STEP.read,
)

# Makes `${m}4` [T, B, N, G, 1] from the B or C named $source, and the channels per group
_SPREAD = Template("""
    ${m}_grouped = Reshape($source, in_groups)
    ${m}_groups = Shape<start=2, end=3>(${m}_grouped)
    ${m}_turned = Transpose<perm=[0, 1, 3, 2]>(${m}_grouped)
    ${m}_steps = $counted
    ${m}4 = Unsqueeze(${m}_steps, behind)
    ${m}_spread = Div(A_width, ${m}_groups)
""")
_IN_GROUPS = """
    behind = Constant<value = int64[1] {-1}>()
    rows_axis = Constant<value = int64[1] {-2}>()
    as_it_is = Constant<value = int64[3] {0, 0, -1}>()
    A_sizes = Shape(A)
    A_rows, A_width = Split<axis=0, num_outputs=2>(A_sizes)
    in_groups = Concat<axis=0>(as_it_is, A_rows)
    of_channels = Concat<axis=0>(behind, A_sizes)
"""


def in_groups(B: str, C: str, state_bits: int) -> str:
    """Return nodes that make `B4` and `C4`, which `GROUPED` reads, from arrays [T, B, …].

    For an int8 state they are scaled to its steps.
    """
    form = {"B": "Identity(B_turned)", "C": "Identity(C_turned)"}
    if state_bits == 8:
        form = {"B": "Div(B_turned, state_scale)", "C": "Mul(C_turned, state_scale)"}
    parts = (_SPREAD.substitute(m=m, source=s, counted=form[m]) for m, s in (("B", B), ("C", C)))
    return _IN_GROUPS + "".join(parts)


_SCAN = Template("""
    axis2 = Constant<value = int64[1] {2}>()
    axis3 = Constant<value = int64[1] {3}>()
    shifted = Add($dt, $dt_bias)
    $softplus
    scaled = Mul(positive, $x)
    delta4 = Unsqueeze(positive, axis2)
    scaled4 = Unsqueeze(scaled, axis2)
$rows
    $walks
    read = Squeeze(reads, axis2)
    skip = Mul($x, $D)
    ungated = Add(read, skip)
    open = Sigmoid($z)
    gate = Mul($z, open)
    y = Mul(ungated, gate)
""")


def selective_scan() -> str:
    return _scan(False, STEP)


def selective_scan_groups() -> str:
    return _scan(True, GROUPED)


def _scan(grouped: bool, step: Step, suffix: str = "", state_bits: int = 32) -> str:
    """Return the body of Mamba-1's scan in fp32, of A and values named x, dt, … + `suffix`."""
    names = {name: name + suffix for name in ("x", "dt", "B", "C", "z", "D", "dt_bias")}
    B, C = names["B"], names["C"]
    single = f"    B4 = Unsqueeze({B}, axis3)\n    C4 = Unsqueeze({C}, axis2)"
    rows = in_groups(B, C, state_bits) if grouped else single
    return _SCAN.substitute(names, softplus=SOFTPLUS, rows=rows, walks=walks(step, state_bits))


# -- int8 ------------------------------------------------------------------------------------------

SUFFIX = "_wide"  # of the names of values in fp32

# One node for a value with one scale, two with a scale per channel: for 1536 numbers these take
# 2.3 µs, per-channel DequantizeLinear 3.4 µs. The If is resolved when the model is loaded.
_WIDE_ACTIVATION = Template("""
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

RATES = """
    A_size = Exp(A_log_wide)
    A = Neg(A_size)
"""


def widened(scales: Mapping[str, str]) -> str:
    """Return nodes that dequantize activations, given as name → scale."""
    return "".join(
        _WIDE_ACTIVATION.substitute(
            name=name, scale=scale, zero="zero_s8" if name in ("dt", "dt_all", "z") else "zero_u8"
        )
        for name, scale in scales.items()
    )


def rates_and_constants() -> str:
    """Return nodes that make A, D and dt_bias in fp32."""
    return widened_constants(True, "A_log", "D", "dt_bias") + RATES


# How a state is stored. An int8 state is in units of state_scale, because B is divided and C
# multiplied by it. Storing the state then is rounding only, for any shape of the scale.
_KEEP = {16: "Cast<to=10>(h)", 8: "QuantizeLinear(h, one_step, zero_s8)"}


def to_h(step: Step) -> str:
    """Return the text of a step with `after` renamed to `h`, the state before it is rounded."""
    return re.sub(r"\bafter\b", "h", step.text)


def rounded(token: str, state_bits: int, rows: Mapping[str, str], state: str, read: str) -> Step:
    """Return a step that rounds its state. `token` makes `h` and `read_t` from `wide`, in fp32."""
    text = f"""
            wide = Cast<to=1>({{before}}){token}
            after = {_KEEP[state_bits]}"""
    return Step(text, rows, state, read)


_STATE_STEPS = """
    along_axis = Constant<value = int64[1] {-1}>()
    state_steps = Reshape(state_scale, along_axis)
    B_steps = Div(B_scale, state_steps)
    C_steps = Mul(C_scale, state_steps)
"""


def ort_selective_scan_int8(state_bits: int) -> str:
    return _scan_int8(state_bits, False)


def ort_selective_scan_groups_int8(state_bits: int) -> str:
    return _scan_int8(state_bits, True)


def _scan_int8(state_bits: int, grouped: bool) -> str:
    scales = {name: f"{name}_scale" for name in ("x", "dt", "B", "C", "z")}
    text = STEPS_AND_ZEROS
    if state_bits == 8 and not grouped:
        text += _STATE_STEPS
        scales |= {"B": "B_steps", "C": "C_steps"}
    step = GROUPED if grouped else STEP
    if state_bits != 32:
        token = to_h(step).replace("{before}", "wide")
        step = rounded(token, state_bits, step.rows, step.state, step.read)
    text += widened(scales) + rates_and_constants()
    return text + _scan(grouped, step, SUFFIX, state_bits)
