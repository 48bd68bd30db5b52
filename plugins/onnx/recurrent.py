"""Bodies of the convolution and of the scans."""

from __future__ import annotations

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

# What Mamba-2's scans begin with: Δ, Δ·x by head, and B and C by group [T,B,G,N].
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
    $softplus
    delta = Clip(positive, low, high)
    rate = Mul(delta, A)
    x4 = Reshape($x, head_shape)
    delta4 = Unsqueeze(delta, axis3)
    scaled = Mul(x4, delta4)
    B4 = Reshape($B, group_shape)
    C4 = Reshape($C, group_shape)
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

# SSD's quadratic form. b batch, h head, t/j token, r kept row, p head_dim, n state.
# `mask` is added before the exponential: masked pairs have a positive exponent, which may overflow.
_QUADRATIC = Template("""
    rate_bht = Transpose<perm=[1, 2, 0]>(rate)
    descendants = Transpose<perm=[1, 0]>(ancestors)
    S = MatMul(rate_bht, descendants)
    S_t = Unsqueeze(S, axis3)
    axis2 = Constant<value = int64[1] {2}>()
    S_j = Unsqueeze(S, axis2)
    far = Constant<value = float {1e30}>()
    outside = Sub(ancestors, one)
    mask = Mul(outside, far)
    between = Sub(S_t, S_j)
    masked = Add(between, mask)
    fade = Exp(masked)
    scaled_bhtp = Transpose<perm=[1, 2, 0, 3]>(scaled)
    scaled_bhpt = Transpose<perm=[1, 2, 3, 0]>(scaled)
    B_tn = Transpose<perm=[1, 2, 0, 3]>($B_heads)
    B_nt = Transpose<perm=[1, 2, 3, 0]>($B_heads)
    C_tn = Transpose<perm=[1, 2, 0, 3]>($C_heads)
    scores = MatMul(C_tn, B_nt)
    weights = Mul(scores, fade)
    inner = MatMul(weights, scaled_bhtp)
    since = Exp(S_t)
    state_bhnp = Transpose<perm=[0, 1, 3, 2]>(ssm_state)
    seen = MatMul(C_tn, state_bhnp)
    outer = Mul(seen, since)
    y_bhtp = Add(inner, outer)
    y4 = Transpose<perm=[2, 0, 1, 3]>(y_bhtp)
    fade_bhrj = Gather<axis=2>(fade, kept)
    fade_rbhj = Transpose<perm=[2, 0, 1, 3]>(fade_bhrj)
    fade_kept = Unsqueeze(fade_rbhj, axis3)
    feed = Mul(fade_kept, scaled_bhpt)
    fed = MatMul(feed, B_tn)
    since_bhr = Gather<axis=2>(since, kept)
    since_rbh = Transpose<perm=[2, 0, 1, 3]>(since_bhr)
    since_kept = Unsqueeze(since_rbh, axis3)
    faded = Mul(since_kept, ssm_state)
    ssm_states = Add(faded, fed)
""")

_HEADS_END = Template("""
    D_column = Unsqueeze($D, last)
    skip = Mul(x4, D_column)
    y_heads = Add(y4, skip)
    flat = Constant<value = int64[3] {0, 0, -1}>()
    y = Reshape(y_heads, flat)
""")


def selective_scan_heads(
    one_group: bool, suffix: str = "", recurrence: Template = _QUADRATIC
) -> str:
    """Mamba-2's scan of the values named x, dt, … + `suffix`, and A, in fp32.

    `recurrence` goes from rate, scaled [T,B,H,P], $B_heads and $C_heads to y4 and ssm_states.
    """
    names = {name: name + suffix for name in ("x", "dt", "B", "C", "D", "dt_bias")}
    by_head = ("B4", "C4") if one_group else ("B_heads", "C_heads")
    parts = (
        _HEADS_START.substitute(names, softplus=SOFTPLUS),
        "" if one_group else _BY_HEAD,
        recurrence.substitute(B_heads=by_head[0], C_heads=by_head[1]),
        _HEADS_END.substitute(names),
    )
    return "".join(parts)


SELECTIVE_SCAN_HEADS_1 = selective_scan_heads(one_group=True)
SELECTIVE_SCAN_HEADS = selective_scan_heads(one_group=False)
