"""Bodies of the convolution and of the scans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

from edge.plugins.onnx.recurrence import Step, walks

# Taps are added up by a product with ones, because ReduceSum takes 5 µs for one token of 1536
# channels, more than all else here, and the product with its two changes of shape 1.5 µs.
_CONVOLUTION = Template("""
    inputs = Concat<axis=0>(conv_state, x)
    windows = Gather<axis=0>(inputs, taps)
    conv_states = Gather<axis=0>(inputs, kept_taps)
    $widen
    products = Mul($windows, $weight)
    flat = Constant<value = int64[3] {0, 0, -1}>()
    rows = Reshape(products, flat)
    tap_count = Shape<start=0, end=1>(weight)
    ones = ConstantOfShape<value = float[1] {1.0}>(tap_count)
    sums = MatMul(ones, rows)
    shape = Shape(x)
    summed = Reshape(sums, shape)
    biased = Add(summed, $bias)
    open = Sigmoid(biased)
    $y = Mul(biased, open)
""")


def causal_conv1d(
    y: str = "y",
    windows: str = "windows",
    weight: str = "weight",
    bias: str = "bias",
    widen: str = "",
) -> str:
    """The convolution in fp32 of the values of these names, the first three of `widen`'s making."""
    return _CONVOLUTION.substitute(y=y, windows=windows, weight=weight, bias=bias, widen=widen)


CAUSAL_CONV1D = causal_conv1d()

# softplus by ops that have vector instructions everywhere: max(v, 0) + log1p(exp(-|v|)), with
# log1p(u) = log(w) + (u - (w - 1)) for w = 1 + u <= 2, whose second term is what rounding w lost.
# ONNX Runtime's Softplus calls log1p number by number: 11 ns each, against 3 ns for all of these.
# Mamba-2 has one number a head, not one a channel: there it is the quicker, by nine nodes.
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

# Mamba-1's token. All is computed from its few rows: with the exponential hoisted out of the loop,
# arrays of [T,B,N,E] fall out of the cache, and it is half as fast.
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

_SCAN = Template("""
    axis2 = Constant<value = int64[1] {2}>()
    axis3 = Constant<value = int64[1] {3}>()
    shifted = Add($dt, $dt_bias)
    $softplus
    scaled = Mul(positive, $x)
    delta4 = Unsqueeze(positive, axis2)
    scaled4 = Unsqueeze(scaled, axis2)
    B4 = Unsqueeze($B, axis3)
    C4 = Unsqueeze($C, axis2)
    $walks
    read = Squeeze(reads, axis2)
    skip = Mul($x, $D)
    ungated = Add(read, skip)
    open = Sigmoid($z)
    gate = Mul($z, open)
    y = Mul(ungated, gate)
""")


def selective_scan(suffix: str = "", step: Step = STEP, state_bits: int = 32) -> str:
    """Mamba-1's scan of the values named x, dt, … + `suffix`, and A, in fp32."""
    names = {name: name + suffix for name in ("x", "dt", "B", "C", "z", "D", "dt_bias")}
    return _SCAN.substitute(names, softplus=SOFTPLUS, walks=walks(step, state_bits))


SELECTIVE_SCAN = selective_scan()

# What Mamba-2's scans need of attributes and constants: shapes, and A and D as [H,1,1].
_HEADS_START = Template("""
    last = Constant<value = int64[1] {-1}>()
    last2 = Constant<value = int64[2] {-1, -2}>()
    unit_axis = Constant<value = int64[1] {1}>()
    stay2 = Constant<value = int64[2] {0, 0}>()
    flat = Constant<value = int64[3] {0, 0, -1}>()
    heads_0 = Constant<value_int: int = @heads>()
    heads_1 = Reshape(heads_0, last)
    groups_0 = Constant<value_int: int = @groups>()
    groups_1 = Reshape(groups_0, last)
    head_columns = Concat<axis=0>(stay2, heads_1, last, unit_axis)
    group_columns = Concat<axis=0>(stay2, groups_1, last, unit_axis)
    group_rows = Concat<axis=0>(stay2, groups_1, unit_axis, last)
    low = Constant<value_float: float = @dt_min>()
    high = Constant<value_float: float = @dt_max>()
    A_head = Unsqueeze(A, last2)
    D_head = Unsqueeze($D, last2)
""")

# Several groups: each head gets its group's B and C. One group's broadcast over the heads.
_GROUP_OF_HEAD = """
    from_0 = Constant<value = int64 {0}>()
    by_1 = Constant<value = int64 {1}>()
    head = Range(from_0, heads_0, by_1)
    share = Div(heads_0, groups_0)
    group = Div(head, share)
"""
_BY_HEAD = Template("""
        B_heads = Gather<axis=2>($B, group)
        C_heads = Gather<axis=2>($C, group)
""")

# Tokens as the recurrence steps through them: exp(Δ·A) [T,B,H,1,1], Δ·x and D·x [T,B,H,P,1],
# B [T,B,G,1,N] and C [T,B,G,N,1].
_STEPS = Template("""
        shifted = Add($dt, $dt_bias)
        positive = Softplus(shifted)
        clipped = Clip(positive, low, high)
        delta = Unsqueeze(clipped, last2)
        rate = Mul(delta, A_head)
        decay = Exp(rate)
        x5 = Reshape($x, head_columns)
        scaled = Mul(x5, delta)
        skip = Mul(x5, D_head)
        B_rows = Reshape($B, group_rows)
        C_columns = Reshape($C, group_columns)
""")

# Tokens as matrices, the logged ones before the run's: Δ·A [M,B,H,1], x and Δ·x [M,B,H,P],
# B [M,B,G,N] and, of the run's alone, C [T,B,G,N].
_WITH_LOGS = """
        x_all = Concat<axis=0>(x_log, x)
        dt_all = Concat<axis=0>(dt_log, dt)
        B_all = Concat<axis=0>(B_log, B)
"""
_MATRICES = Template("""
        shifted = Add($dt, $dt_bias)
        positive = Softplus(shifted)
        clipped = Clip(positive, low, high)
        delta = Unsqueeze(clipped, last)
        rate = Mul(delta, A_column)
        x4 = Reshape($x, head_matrix)
        scaled = Mul(x4, delta)
        B4 = Reshape($B, group_matrix)
        C4 = Reshape($C, group_matrix)
""")

# One token that nothing was logged before, whose state is wanted, is a step of the recurrence; any
# other run is SSD's quadratic form, which has 29 nodes more. Each begins with its own arrays: so a
# step joins no logs and changes no shape later. What comes from indices alone stands before the
# branches: there ONNX Runtime computes it once for all layers.
# b batch, h head, m/j any token, t one of the run, r kept row, p head_dim, n state.
# `mask` is added before the exponential: masked pairs have a positive exponent, which may overflow.
# Products by element go along p or n, never along the few j, because a row is a call. So what fades
# is B, not Δ·x; and a step's outer product is a MatMul, which takes a third of Mul's time.
_STEP_OR_QUADRATIC = Template("""
    head_matrix = Concat<axis=0>(stay2, heads_1, last)
    group_matrix = Concat<axis=0>(stay2, groups_1, last)
    A_column = Unsqueeze(A, last)
    D_column = Unsqueeze($D, last)
    one = Constant<value = float {1.0}>()
    far = Constant<value = float {1e30}>()
    outside = Sub(ancestors, one)
    mask = Mul(outside, far)
    mask_rj = Gather<axis=0>(mask, kept)
    whole_and_rows = Size(mask_rj)
    one_alone = Constant<value = int64 {1}>()
    is_step = Equal(whole_and_rows, one_alone)
    around_j = Constant<value = int64[3] {1, 2, 4}>()
    mask_r = Unsqueeze(mask_rj, around_j)
    y, ssm_states = If(is_step) <
      then_branch = step () => (float[T,B,E] y_step, float[R,B,H,P,N] state_step) {$steps
        faded_step = Mul(decay, ssm_state)
        fed_step = MatMul(scaled, $B_rows)
        state_step = Add(faded_step, fed_step)
        read_step = MatMul(state_step, $C_columns)
        sum_step = Add(read_step, skip)
        y_step = Reshape(sum_step, flat)
      },
      else_branch = run () => (float[T,B,E] y_run, float[R,B,H,P,N] states_run) {$matrices
        axis0 = Constant<value = int64[1] {0}>()
        axis2 = Constant<value = int64[1] {2}>()
        to_end = Constant<value = int64[1] {9223372036854775807}>()
        as_column = Constant<value = int64[4] {0, 0, -1, 1}>()
        logged = Shape<start=0, end=1>(x_log)
        rate_bh1m = Transpose<perm=[1, 2, 3, 0]>(rate)
        descendants = Transpose<perm=[1, 0]>(ancestors)
        S_j = MatMul(rate_bh1m, descendants)
        S_m = Reshape(S_j, as_column)
        mask_t = Slice(mask, logged, to_end, axis0)
        S_t = Slice(S_m, logged, to_end, axis2)
        between = Sub(S_t, S_j)
        masked = Add(between, mask_t)
        fade = Exp(masked)
        scaled_bhjp = Transpose<perm=[1, 2, 0, 3]>(scaled)
        B_nj = Transpose<perm=[1, 2, 3, 0]>($B4)
        C_tn = Transpose<perm=[1, 2, 0, 3]>($C4)
        scores = MatMul(C_tn, B_nj)
        weights = Mul(scores, fade)
        inner = MatMul(weights, scaled_bhjp)
        since = Exp(S_t)
        state_bhnp = Transpose<perm=[0, 1, 3, 2]>(ssm_state)
        seen = MatMul(C_tn, state_bhnp)
        outer = Mul(seen, since)
        y_bhtp = Add(inner, outer)
        read_run = Transpose<perm=[2, 0, 1, 3]>(y_bhtp)
        x_run = Slice(x4, logged, to_end, axis0)
        skip_run = Mul(x_run, D_column)
        sum_run = Add(read_run, skip_run)
        y_run = Reshape(sum_run, flat)
        S_bhr = Gather<axis=2>(S_m, kept)
        S_rbh = Transpose<perm=[2, 0, 1, 3]>(S_bhr)
        S_r = Unsqueeze(S_rbh, last)
        between_r = Sub(S_r, S_m)
        masked_r = Add(between_r, mask_r)
        fade_r = Exp(masked_r)
        scaled_bhpj = Transpose<perm=[1, 2, 3, 0]>(scaled)
        B_jn = Transpose<perm=[1, 2, 0, 3]>($B4)
        B_faded = Mul(fade_r, B_jn)
        fed = MatMul(scaled_bhpj, B_faded)
        since_r = Exp(S_r)
        faded = Mul(since_r, ssm_state)
        states_run = Add(faded, fed)
      }>
""")


@dataclass(frozen=True)
class Heads:
    """Some of a Mamba-2 scan's values in fp32.

    Attributes:
        nodes: what gives them, in the ONNX text syntax.
        names: of x, dt, B, C, D and dt_bias → what they are called after `nodes`.
    """

    nodes: str
    names: Mapping[str, str]


# The names of the statement: own tokens, and logged and own ones.
OWN = {name: name for name in ("x", "dt", "B", "C")}
EVERY = {"x": "x_all", "dt": "dt_all", "B": "B_all", "C": "C"}


def _by_head(one_group: bool, B: str, C: str) -> tuple[str, dict[str, str]]:
    """Nodes after which each head has its B and C, and B and C → what they are called then."""
    if one_group:
        return "", {B: B, C: C}
    return _BY_HEAD.substitute(B=B, C=C), {B: "B_heads", C: "C_heads"}


def start_heads(one_group: bool, names: Mapping[str, str]) -> str:
    """What a scan of Mamba-2 begins with, whatever its recurrence."""
    return _HEADS_START.substitute(names) + ("" if one_group else _GROUP_OF_HEAD)


def steps_of_heads(one_group: bool, own: Heads) -> tuple[str, dict[str, str]]:
    """Nodes from `own` to decay, scaled and skip, and B_rows and C_columns → their names."""
    nodes, by_head = _by_head(one_group, "B_rows", "C_columns")
    return own.nodes + _STEPS.substitute(own.names) + nodes, by_head


def selective_scan_heads(one_group: bool, own: Heads, every: Heads) -> str:
    """Mamba-2's scan of the run's `own` tokens, or of `every` one, under the names in `EVERY`."""
    steps, of_step = steps_of_heads(one_group, own)
    nodes, of_run = _by_head(one_group, "B4", "C4")
    matrices = _WITH_LOGS + every.nodes + _MATRICES.substitute(every.names) + nodes
    return start_heads(one_group, own.names) + _STEP_OR_QUADRATIC.substitute(
        of_step | of_run, D=own.names["D"], steps=steps, matrices=matrices
    )


def _selective_scan_heads(one_group: bool) -> str:
    constants = {"D": "D", "dt_bias": "dt_bias"}
    return selective_scan_heads(one_group, Heads("", OWN | constants), Heads("", EVERY | constants))


SELECTIVE_SCAN_HEADS_1 = _selective_scan_heads(one_group=True)
SELECTIVE_SCAN_HEADS = _selective_scan_heads(one_group=False)
