"""Bodies of the convolution and of the scans."""

from __future__ import annotations

CAUSAL_CONV1D = """
    inputs = Concat<axis=0>(conv_state, x)
    windows = Gather<axis=0>(inputs, taps)
    products = Mul(windows, weight)
    tap_axis = Constant<value = int64[1] {1}>()
    summed = ReduceSum<keepdims=0>(products, tap_axis)
    biased = Add(summed, bias)
    open = Sigmoid(biased)
    y = Mul(biased, open)
    conv_states = Gather<axis=0>(inputs, kept_taps)
"""

# softplus by ops that have vector instructions everywhere: max(v, 0) + log1p(exp(-|v|)), with
# log1p(u) = log(w) + (u - (w - 1)) for w = 1 + u <= 2, whose second term is what rounding w lost.
# ONNX Runtime's Softplus calls log1p number by number: 11 ns each, against 3 ns for all of these.
_SOFTPLUS = """
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

# The loop body of a chain. All is computed inside, from one token's few rows: with the exponential
# hoisted out, arrays of [T,B,N,E] fall out of the cache, and it is half as fast.
_STEP = """
            exponent = Mul(delta_t, A)
            decay = Exp(exponent)
            fed = Mul(scaled_t, B_t)
            faded = Mul(decay, before)
            after = Add(faded, fed)
            read_t = MatMul(C_t, after)
"""
_STEP_INPUTS = """float[B,N,E] before, float[B,1,E] delta_t, float[B,1,E] scaled_t,
             float[B,N,1] B_t, float[B,1,N] C_t"""

# A chain whose states are written as they come.
_CHAIN = (
    """Scan <num_scan_inputs=4,
              body = step ("""
    + _STEP_INPUTS
    + """)
                  => (float[B,N,E] after, float[B,1,E] read_t, float[B,N,E] emitted) {"""
    + _STEP
    + """
                emitted = Identity(after)
              }>(ssm_state, delta4, scaled4, B4, C4)
"""
)

# Five ways through the same recurrence. One token needs no loop. A chain whose every state is kept
# writes them where they stay: `kept` ascends, so its length says so. One of which the last alone is
# kept never writes the others. A tree walks with the states in a sequence, whose elements are
# shared, not copied: node j's state is element j+1, the state before the run element 0. What is
# computed from the indices alone, ONNX Runtime computes once for all layers.
SELECTIVE_SCAN = (
    """
    axis0 = Constant<value = int64[1] {0}>()
    axis2 = Constant<value = int64[1] {2}>()
    axis3 = Constant<value = int64[1] {3}>()
    unit = Constant<value = int64[1] {1}>()
    length = Shape(parents)
    kept_length = Shape(kept)
    alone = Equal(length, unit)
    is_step = And(alone, last_only)
    keeps_all = Equal(length, kept_length)
    is_chain = Not(tree)
    is_draft = And(keeps_all, is_chain)
    shifted = Add(dt, dt_bias)
"""
    + _SOFTPLUS
    + """
    scaled = Mul(positive, x)
    delta4 = Unsqueeze(positive, axis2)
    scaled4 = Unsqueeze(scaled, axis2)
    B4 = Unsqueeze(B, axis3)
    C4 = Unsqueeze(C, axis2)
    read4, ssm_states = If(is_step) <
      then_branch = single () => (float[T,B,1,E] step_read, float[R,B,N,E] step_states) {
        exponents = Mul(delta4, A)
        decays = Exp(exponents)
        feeds = Mul(scaled4, B4)
        faded = Mul(decays, ssm_state)
        step_states = Add(faded, feeds)
        step_read = MatMul(C4, step_states)
      },
      else_branch = several () => (float[T,B,1,E] run_read, float[R,B,N,E] run_states) {
        run_read, run_states = If(is_draft) <
          then_branch = draft () => (float[T,B,1,E] draft_read, float[R,B,N,E] draft_states) {
            draft_end, draft_read, draft_states = """
    + _CHAIN
    + """
          },
          else_branch = long () => (float[T,B,1,E] long_read, float[R,B,N,E] long_states) {
            long_read, long_states = If(last_only) <
              then_branch = short () => (float[T,B,1,E] short_read, float[R,B,N,E] short_states) {
                final, short_read = Scan <num_scan_inputs=4,
                  body = step ("""
    + _STEP_INPUTS
    + """)
                      => (float[B,N,E] after, float[B,1,E] read_t) {"""
    + _STEP
    + """
                  }>(ssm_state, delta4, scaled4, B4, C4)
                short_states = Unsqueeze(final, axis0)
              },
              else_branch = full () => (float[T,B,1,E] full_read, float[R,B,N,E] full_states) {
                full_read, states = If(tree) <
                  then_branch = walk () => (float[T,B,1,E] tree_read, float[T,B,N,E] tree_states) {
                    next = Constant<value = int64 {1}>()
                    yes = Constant<value = bool {1}>()
                    steps = Squeeze(length)
                    nothing = SequenceEmpty<dtype=1>()
                    first = SequenceInsert(nothing, ssm_state)
                    exponents = Mul(delta4, A)
                    decays = Exp(exponents)
                    feeds = Mul(scaled4, B4)
                    path = Loop(steps, yes, first) <
                      body = node (int64 t, bool go, seq(float[B,N,E]) seen)
                          => (bool on, seq(float[B,N,E]) grown) {
                        on = Identity(go)
                        parent = Gather<axis=0>(parents, t)
                        slot = Add(parent, next)
                        before = SequenceAt(seen, slot)
                        decay = Gather<axis=0>(decays, t)
                        fed = Gather<axis=0>(feeds, t)
                        faded = Mul(decay, before)
                        after = Add(faded, fed)
                        grown = SequenceInsert(seen, after)
                      }>
                    stacked = ConcatFromSequence<axis=0, new_axis=1>(path)
                    from_one = Constant<value = int64[1] {1}>()
                    to_end = Constant<value = int64[1] {9223372036854775807}>()
                    tree_states = Slice(stacked, from_one, to_end, axis0)
                    tree_read = MatMul(C4, tree_states)
                  },
                  else_branch = chain () => (float[T,B,1,E] way_read, float[T,B,N,E] way_states) {
                    final, way_read, way_states = """
    + _CHAIN
    + """
                  }>
                full_states = Gather<axis=0>(states, kept)
              }>
          }>
      }>
    read = Squeeze(read4, axis2)
    skip = Mul(x, D)
    ungated = Add(read, skip)
    open = Sigmoid(z)
    gate = Mul(z, open)
    y = Mul(ungated, gate)
"""
)

# SSD's quadratic form. b batch, h head, t/j token, r kept row, p head_dim, n state.
# `mask` is added before the exponential: masked pairs have a positive exponent, which may overflow.
_HEADS_START = (
    """
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
    shifted = Add(dt, dt_bias)
"""
    + _SOFTPLUS
    + """
    delta = Clip(positive, low, high)
    rate = Mul(delta, A)
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
    x4 = Reshape(x, head_shape)
    delta4 = Unsqueeze(delta, axis3)
    scaled = Mul(x4, delta4)
    scaled_bhtp = Transpose<perm=[1, 2, 0, 3]>(scaled)
    scaled_bhpt = Transpose<perm=[1, 2, 3, 0]>(scaled)
    B4 = Reshape(B, group_shape)
    C4 = Reshape(C, group_shape)
"""
)

_HEADS_END = """
    scores = MatMul(C_tn, B_nt)
    weights = Mul(scores, fade)
    inner = MatMul(weights, scaled_bhtp)
    since = Exp(S_t)
    state_bhnp = Transpose<perm=[0, 1, 3, 2]>(ssm_state)
    seen = MatMul(C_tn, state_bhnp)
    outer = Mul(seen, since)
    y_bhtp = Add(inner, outer)
    y4 = Transpose<perm=[2, 0, 1, 3]>(y_bhtp)
    D_column = Unsqueeze(D, last)
    skip = Mul(x4, D_column)
    y_heads = Add(y4, skip)
    flat = Constant<value = int64[3] {0, 0, -1}>()
    y = Reshape(y_heads, flat)
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
"""

# One group: B and C broadcast over the heads.
SELECTIVE_SCAN_HEADS_1 = (
    _HEADS_START
    + """
    B_tn = Transpose<perm=[1, 2, 0, 3]>(B4)
    B_nt = Transpose<perm=[1, 2, 3, 0]>(B4)
    C_tn = Transpose<perm=[1, 2, 0, 3]>(C4)
"""
    + _HEADS_END
)

# Several groups: each head gets its group's B and C.
SELECTIVE_SCAN_HEADS = (
    _HEADS_START
    + """
    from_0 = Constant<value = int64 {0}>()
    by_1 = Constant<value = int64 {1}>()
    head = Range(from_0, heads_0, by_1)
    share = Div(heads_0, groups_0)
    group = Div(head, share)
    B_heads = Gather<axis=2>(B4, group)
    C_heads = Gather<axis=2>(C4, group)
    B_tn = Transpose<perm=[1, 2, 0, 3]>(B_heads)
    B_nt = Transpose<perm=[1, 2, 3, 0]>(B_heads)
    C_tn = Transpose<perm=[1, 2, 0, 3]>(C_heads)
"""
    + _HEADS_END
)
