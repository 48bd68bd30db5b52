"""Bodies of the convolution and of the scans."""

from __future__ import annotations

from collections.abc import Mapping
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

# What Mamba-2's scans begin with: the logged tokens before the run's. Then Δ, Δ·x by head, and B
# and C by group [M,B,G,N], [T,B,G,N].
WITH_LOGS = """
    x_all = Concat<axis=0>(x_log, x)
    dt_all = Concat<axis=0>(dt_log, dt)
    B_all = Concat<axis=0>(B_log, B)
"""
_HEADS_START = Template("""
    last = Constant<value = int64[1] {-1}>()
    axis3 = Constant<value = int64[1] {3}>()
    stay2 = Constant<value = int64[2] {0, 0}>()
    heads_0 = Constant<value_int: int = @heads>()
    heads_1 = Reshape(heads_0, last)
    groups_0 = Constant<value_int: int = @groups>()
    groups_1 = Reshape(groups_0, last)
    head_shape = Concat<axis=0>(stay2, heads_1, last)
    group_shape = Concat<axis=0>(stay2, groups_1, last)
    low = Constant<value_float: float = @dt_min>()
    high = Constant<value_float: float = @dt_max>()
    shifted = Add($dt, $dt_bias)
    positive = Softplus(shifted)
    delta = Clip(positive, low, high)
    rate = Mul(delta, A)
    x4 = Reshape($x, head_shape)
    delta4 = Unsqueeze(delta, axis3)
    scaled = Mul(x4, delta4)
    B4 = Reshape($B, group_shape)
    C4 = Reshape($C, group_shape)
    D_column = Unsqueeze($D, last)
""")

# Several groups: each head gets its group's B and C. One group's broadcast over the heads.
_BY_HEAD = """
    from_0 = Constant<value = int64 {0}>()
    by_1 = Constant<value = int64 {1}>()
    head = Range(from_0, heads_0, by_1)
    share = Div(heads_0, groups_0)
    group = Div(head, share)
    B_heads = Gather<axis=2>(B4, group)
    C_heads = Gather<axis=2>(C4, group)
"""

# One token that nothing was logged before, whose state is wanted, is a step of the recurrence; any
# other run is SSD's quadratic form. That form has 27 nodes more, and writes
# the state as well. b batch, h head, m/j any token, t one of the run, r kept row, p head_dim,
# n state.
# `mask` is added before the exponential: masked pairs have a positive exponent, which may overflow.
STEP_OR_QUADRATIC = Template("""
    whole = Size(ancestors)
    rows = Size(kept)
    whole_and_rows = Mul(whole, rows)
    one_alone = Constant<value = int64 {1}>()
    is_step = Equal(whole_and_rows, one_alone)
    y4, ssm_states = If(is_step) <
      then_branch = step () => (float[T,B,H,P] y_step, float[R,B,H,P,N] state_step) {
        decay = Exp(rate)
        one_by_one = Constant<value = int64[2] {3, 4}>()
        decay5 = Unsqueeze(decay, one_by_one)
        scaled5 = Unsqueeze(scaled, last)
        B5 = Unsqueeze($B_heads, axis3)
        C5 = Unsqueeze($C_heads, last)
        faded_step = Mul(decay5, ssm_state)
        fed_step = Mul(scaled5, B5)
        state_step = Add(faded_step, fed_step)
        read5 = MatMul(state_step, C5)
        read = Squeeze(read5, last)
        skip_step = Mul(x4, D_column)
        y_step = Add(read, skip_step)
      },
      else_branch = run () => (float[T,B,H,P] y_run, float[R,B,H,P,N] states_run) {
        axis0 = Constant<value = int64[1] {0}>()
        axis2 = Constant<value = int64[1] {2}>()
        to_end = Constant<value = int64[1] {9223372036854775807}>()
        logged = Shape<start=0, end=1>(x_log)
        rate_bhm = Transpose<perm=[1, 2, 0]>(rate)
        descendants = Transpose<perm=[1, 0]>(ancestors)
        S = MatMul(rate_bhm, descendants)
        S_m = Unsqueeze(S, axis3)
        S_j = Unsqueeze(S, axis2)
        far = Constant<value = float {1e30}>()
        one = Constant<value = float {1.0}>()
        outside = Sub(ancestors, one)
        mask = Mul(outside, far)
        mask_t = Slice(mask, logged, to_end, axis0)
        S_t = Slice(S_m, logged, to_end, axis2)
        between = Sub(S_t, S_j)
        masked = Add(between, mask_t)
        fade = Exp(masked)
        scaled_bhjp = Transpose<perm=[1, 2, 0, 3]>(scaled)
        B_nj = Transpose<perm=[1, 2, 3, 0]>($B_heads)
        C_tn = Transpose<perm=[1, 2, 0, 3]>($C_heads)
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
        y_run = Add(read_run, skip_run)
        mask_r = Gather<axis=0>(mask, kept)
        S_r = Gather<axis=2>(S_m, kept)
        between_r = Sub(S_r, S_j)
        masked_r = Add(between_r, mask_r)
        fade_bhrj = Exp(masked_r)
        fade_rbhj = Transpose<perm=[2, 0, 1, 3]>(fade_bhrj)
        fade_kept = Unsqueeze(fade_rbhj, axis3)
        scaled_bhpj = Transpose<perm=[1, 2, 3, 0]>(scaled)
        feed = Mul(fade_kept, scaled_bhpj)
        B_jn = Transpose<perm=[1, 2, 0, 3]>($B_heads)
        fed = MatMul(feed, B_jn)
        since_bhr = Exp(S_r)
        since_rbh = Transpose<perm=[2, 0, 1, 3]>(since_bhr)
        since_kept = Unsqueeze(since_rbh, axis3)
        faded = Mul(since_kept, ssm_state)
        states_run = Add(faded, fed)
      }>
""")

_HEADS_END = """
    flat = Constant<value = int64[3] {0, 0, -1}>()
    y = Reshape(y4, flat)
"""


# What a scan of logged and own tokens reads, by the names of the statement.
LOGGED_NAMES = {"x": "x_all", "dt": "dt_all", "B": "B_all", "C": "C"}


def selective_scan_heads(
    one_group: bool, names: Mapping[str, str], recurrence: Template = STEP_OR_QUADRATIC
) -> str:
    """Mamba-2's scan in fp32 of the values that `names` has for x, dt, B, C, D and dt_bias, and A.

    `recurrence` goes from rate, scaled [M,B,H,P], x4, $B_heads and $C_heads to y4 and ssm_states.
    """
    by_head = ("B4", "C4") if one_group else ("B_heads", "C_heads")
    parts = (
        _HEADS_START.substitute(names),
        "" if one_group else _BY_HEAD,
        recurrence.substitute(B_heads=by_head[0], C_heads=by_head[1]),
        _HEADS_END,
    )
    return "".join(parts)


def _selective_scan_heads(one_group: bool) -> str:
    names = {**LOGGED_NAMES, "D": "D", "dt_bias": "dt_bias"}
    return WITH_LOGS + selective_scan_heads(one_group, names)


SELECTIVE_SCAN_HEADS_1 = _selective_scan_heads(one_group=True)
SELECTIVE_SCAN_HEADS = _selective_scan_heads(one_group=False)
