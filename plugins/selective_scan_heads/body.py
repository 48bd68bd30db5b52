"""ONNX function bodies of Mamba-2's scan.

An int8 body dequantizes and continues as the float body, unless its state is rounded after every
token; then it runs token by token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

from edge.plugins.quantize.body import STEPS_AND_ZEROS
from edge.plugins.selective_scan.body import SUFFIX, rates_and_constants, rounded, widened
from edge.plugins.selective_scan.recurrence import walks

# Nodes that depend only on attributes and constants: shapes, and A and D as [H,1,1].
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

# With several groups, each head gets its group's B and C. Those of a single group broadcast.
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

# Tokens in the form of the recurrence: exp(Δ·A) [T,B,H,1,1], Δ·x and D·x [T,B,H,P,1],
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
# B [M,B,G,N] and, only for the run's, C [T,B,G,N].
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

# One token without logged ones before it, whose state is kept, is a step of the recurrence. Any
# other run uses SSD's quadratic form, which has 29 more nodes. Each branch prepares its own arrays,
# so a step neither joins logs nor reshapes later. Nodes that depend on indices only are outside the
# branches, where ONNX Runtime computes them once for all layers.
# b batch, h head, m/j any token, t token of the run, r kept row, p head_dim, n state.
# `mask` is added before the exponential, because masked pairs have positive exponents that may
# overflow. Elementwise products go along p or n, never along the few j, because each row is a call.
# So the decay is applied to B, not to Δ·x, and a step's outer product is a MatMul, which takes a
# third of Mul's time.
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
class _Heads:
    """Values of a Mamba-2 scan in fp32.

    Attributes:
        nodes: nodes that make them, in the ONNX text syntax.
        names: x, dt, B, C, D and dt_bias → their names after `nodes`.
    """

    nodes: str
    names: Mapping[str, str]


# Names of the run's own tokens, and of the logged and own ones together.
_NEW = {name: name for name in ("x", "dt", "B", "C")}
_ALL = {"x": "x_all", "dt": "dt_all", "B": "B_all", "C": "C"}


def _by_head(one_group: bool, B: str, C: str) -> tuple[str, dict[str, str]]:
    """Return nodes that give each head its B and C, and B and C → their names after these nodes."""
    if one_group:
        return "", {B: B, C: C}
    return _BY_HEAD.substitute(B=B, C=C), {B: "B_heads", C: "C_heads"}


def _start(one_group: bool, names: Mapping[str, str]) -> str:
    """Return the nodes that every Mamba-2 scan starts with."""
    return _HEADS_START.substitute(names) + ("" if one_group else _GROUP_OF_HEAD)


def _steps(one_group: bool, new: _Heads) -> tuple[str, dict[str, str]]:
    """Return nodes from `new` to decay, scaled and skip, and B_rows and C_columns → their names."""
    nodes, by_head = _by_head(one_group, "B_rows", "C_columns")
    return new.nodes + _STEPS.substitute(new.names) + nodes, by_head


def _step_or_quadratic(one_group: bool, new: _Heads, all_tokens: _Heads) -> str:
    """Return the scan as a step of `new` tokens, or in quadratic form of `all_tokens`."""
    steps, step_names = _steps(one_group, new)
    nodes, run_names = _by_head(one_group, "B4", "C4")
    matrices = _WITH_LOGS + all_tokens.nodes + _MATRICES.substitute(all_tokens.names) + nodes
    return _start(one_group, new.names) + _STEP_OR_QUADRATIC.substitute(
        step_names | run_names, D=new.names["D"], steps=steps, matrices=matrices
    )


def selective_scan_heads(groups: int | None) -> str:
    constants = {"D": "D", "dt_bias": "dt_bias"}
    new, all_tokens = (_Heads("", names | constants) for names in (_NEW, _ALL))
    return _step_or_quadratic(groups == 1, new, all_tokens)


# -- int8 ------------------------------------------------------------------------------------------

_HEADS_ROWS = {"decay": "B,H,1,1", "scaled": "B,H,P,1", "B_in": "B,G,1,N", "C_out": "B,G,N,1"}
_HEADS_TOKEN = """
            faded = Mul(wide, {decay})
            fed = MatMul({scaled}, {B_in})
            h = Add(faded, fed)
            read_t = MatMul(h, {C_out})"""
# `cube` gives a scale [1] the three axes of a scale [H,1,N].
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


def _token_by_token(state_bits: int, one_group: bool, new: _Heads) -> str:
    """Return the scan with a state that is rounded after every token."""
    steps, by_head = _steps(one_group, new)
    in_and_out = _IN_AND_OUT[state_bits].substitute(by_head)
    step = rounded(_HEADS_TOKEN, state_bits, _HEADS_ROWS, state="B,H,P,N", read="B,H,P,1")
    start = _start(one_group, new.names) + steps + in_and_out
    return start + walks(step, state_bits) + _HEADS_END


def _wide(read: Mapping[str, str]) -> _Heads:
    """Return the activations in `read`, x, dt, B and C → name, and the constants, in fp32."""
    nodes = widened({name: f"{value}_scale" for value, name in read.items()})
    names = {
        value: name + SUFFIX for value, name in {**read, "D": "D", "dt_bias": "dt_bias"}.items()
    }
    return _Heads(nodes, names)


def ort_selective_scan_heads_int8(state_bits: int, groups: int | None) -> str:
    """Return the int8 body. It reads the logs only if the state is not rounded."""
    text, new = STEPS_AND_ZEROS + rates_and_constants(), _wide(_NEW)
    if state_bits != 32:
        return text + _token_by_token(state_bits, groups == 1, new)
    return text + _step_or_quadratic(groups == 1, new, _wide(_ALL))
