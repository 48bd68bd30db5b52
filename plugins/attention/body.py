"""ONNX function bodies of the rotary embedding and of attention."""

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

# The op indexes its cos and sin tables by offset + t; ours already have one row per token.
ORT_ROPE = """
    offset = Constant<value = int64[1] {0}>()
    y = com.microsoft.RotaryEmbedding<interleaved: int = 0, num_heads: int = @heads,
        rotary_embedding_dim: int = @dim>(x, offset, cos, sin)
"""

# The caches are updated in place when key_cache_out is bound to key_cache's buffer.
ORT_ATTENTION = """
    y, key_cache_out, value_cache_out = com.microsoft.GroupQueryAttention
        <do_rotary: int = 0, num_heads: int = @heads, kv_num_heads: int = @kv_heads,
         scale: float = @scale, softcap: float = @softcap>
        (q, k, v, key_cache, value_cache, last, total, "", "", "", bias)
"""

# The same op on fp32 copies of the valid slots, because its caches must have q's type. Binding
# …_out to a cache's buffer makes the scatter write only the new rows.
ORT_ATTENTION_F16 = """
    first = Constant<value = int64[1] {0}>()
    one = Constant<value = int64 {1}>()
    axis = Constant<value = int64[1] {2}>()
    total_long = Cast<to=7>(total)
    steps_1 = Shape<start=1, end=2>(k)
    steps = Squeeze(steps_1)
    past = Sub(total_long, steps)
    last_axis = Constant<value = int64[1] {-1}>()
    past_1 = Reshape(past, last_axis)
    slot = Range(past, total_long, one)
    column = Constant<value = int64[4] {1, 1, -1, 1}>()
    slot_column = Reshape(slot, column)
    stay = Constant<value = int64[2] {0, 0}>()
    heads_0 = Constant<value_int: int = @kv_heads>()
    heads_1 = Reshape(heads_0, last_axis)
    by_head = Concat<axis=0>(stay, heads_1, last_axis)
    k_half = Cast<to=10>(k)
    k_heads = Reshape(k_half, by_head)
    k_rows = Transpose<perm=[0, 2, 1, 3]>(k_heads)
    v_half = Cast<to=10>(v)
    v_heads = Reshape(v_half, by_head)
    v_rows = Transpose<perm=[0, 2, 1, 3]>(v_heads)
    rows_shape = Shape(k_rows)
    at = Expand(slot_column, rows_shape)
    key_cache_out = ScatterElements<axis=2>(key_cache, at, k_rows)
    value_cache_out = ScatterElements<axis=2>(value_cache, at, v_rows)
    key_past = Slice(key_cache, first, past_1, axis)
    value_past = Slice(value_cache, first, past_1, axis)
    keys = Cast<to=1>(key_past)
    values = Cast<to=1>(value_past)
    k_kept = Cast<to=1>(k_half)
    v_kept = Cast<to=1>(v_half)
    y, all_keys, all_values = com.microsoft.GroupQueryAttention
        <do_rotary: int = 0, num_heads: int = @heads, kv_num_heads: int = @kv_heads,
         scale: float = @scale, softcap: float = @softcap>
        (q, k_kept, v_kept, keys, values, last, total, "", "", "", bias)
"""
