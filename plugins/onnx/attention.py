"""Bodies of the rotary embedding and of attention."""

from __future__ import annotations

ROPE = """
    last = Constant<value = int64[1] {-1}>()
    stay2 = Constant<value = int64[2] {0, 0}>()
    heads_0 = Constant<value_int: int = @heads>()
    heads_1 = Reshape(heads_0, last)
    shape = Concat<axis=0>(stay2, heads_1, last)
    x4 = Reshape(x, shape)
    two = Constant<value = int64 {2}>()
    dim_0 = Constant<value_int: int = @dim>()
    half_0 = Div(dim_0, two)
    half = Reshape(half_0, last)
    dim_1 = Reshape(dim_0, last)
    size_0 = Constant<value_int: int = @head_dim>()
    rest_0 = Sub(size_0, dim_0)
    rest_1 = Reshape(rest_0, last)
    sizes = Concat<axis=0>(half, half, rest_1)
    a, b, rest = Split<axis=-1>(x4, sizes)
    axis1 = Constant<value = int64[1] {1}>()
    cos_t = Unsqueeze(cos, axis1)
    sin_t = Unsqueeze(sin, axis1)
    a_cos = Mul(a, cos_t)
    b_sin = Mul(b, sin_t)
    b_cos = Mul(b, cos_t)
    a_sin = Mul(a, sin_t)
    first = Sub(a_cos, b_sin)
    second = Add(b_cos, a_sin)
    turned = Concat<axis=-1>(first, second, rest)
    flat = Constant<value = int64[3] {0, 0, -1}>()
    y = Reshape(turned, flat)
"""

# The op indexes its cos and sin tables by offset + t; ours already hold one row a token.
ORT_ROPE = """
    offset = Constant<value = int64[1] {0}>()
    y = com.microsoft.RotaryEmbedding<interleaved: int = 0, num_heads: int = @heads,
        rotary_embedding_dim: int = @dim>(x, offset, cos, sin)
"""

ATTENTION = """
    end = Constant<value = int64[1] {-1}>()
    stay2 = Constant<value = int64[2] {0, 0}>()
    heads_0 = Constant<value_int: int = @heads>()
    heads_1 = Reshape(heads_0, end)
    kv_0 = Constant<value_int: int = @kv_heads>()
    kv_1 = Reshape(kv_0, end)
    q_shape = Concat<axis=0>(stay2, heads_1, end)
    kv_shape = Concat<axis=0>(stay2, kv_1, end)
    q_bthp = Reshape(q, q_shape)
    k_bthp = Reshape(k, kv_shape)
    v_bthp = Reshape(v, kv_shape)
    q_bhtp = Transpose<perm=[0, 2, 1, 3]>(q_bthp)
    k_bhtp = Transpose<perm=[0, 2, 1, 3]>(k_bthp)
    v_bhtp = Transpose<perm=[0, 2, 1, 3]>(v_bthp)
    total_0 = Cast<to=7>(total)
    total_1 = Reshape(total_0, end)
    steps = Shape<start=1, end=2>(q)
    past_1 = Sub(total_1, steps)
    from_0 = Constant<value = int64[1] {0}>()
    slot_axis = Constant<value = int64[1] {2}>()
    past_0 = Squeeze(past_1)
    by_1 = Constant<value = int64 {1}>()
    slots = Range(past_0, total_0, by_1)
    slots_4 = Constant<value = int64[4] {1, 1, -1, 1}>()
    slots_grid = Reshape(slots, slots_4)
    grid_shape = Shape(k_bhtp)
    where = Expand(slots_grid, grid_shape)
    key_cache_out = ScatterElements<axis=2>(key_cache, where, k_bhtp)
    value_cache_out = ScatterElements<axis=2>(value_cache, where, v_bhtp)
    K = Slice(key_cache_out, from_0, total_1, slot_axis)
    V = Slice(value_cache_out, from_0, total_1, slot_axis)
    zero = Constant<value = int64 {0}>()
    head = Range(zero, heads_0, by_1)
    share = Div(heads_0, kv_0)
    group = Div(head, share)
    K_heads = Gather<axis=1>(K, group)
    V_heads = Gather<axis=1>(V, group)
    K_t = Transpose<perm=[0, 1, 3, 2]>(K_heads)
    raw = MatMul(q_bhtp, K_t)
    factor = Constant<value_float: float = @scale>()
    scaled = Mul(raw, factor)
    biased = Add(scaled, bias)
    shares = Softmax<axis=-1>(biased)
    y_bhtp = MatMul(shares, V_heads)
    y_bthp = Transpose<perm=[0, 2, 1, 3]>(y_bhtp)
    flat = Constant<value = int64[3] {0, 0, -1}>()
    y = Reshape(y_bthp, flat)
"""

# Writes the caches in place when key_cache_out is bound to key_cache's buffer.
ORT_ATTENTION = """
    y, key_cache_out, value_cache_out = com.microsoft.GroupQueryAttention
        <do_rotary: int = 0, num_heads: int = @heads, kv_num_heads: int = @kv_heads,
         scale: float = @scale>(q, k, v, key_cache, value_cache, last, total, "", "", "", bias)
"""
