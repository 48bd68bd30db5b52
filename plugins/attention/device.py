"""Device ops of attention over caches updated in place, for chains and trees, with or without RoPE.

The body attends to all C slots of a cache, because only the device knows how many are valid. The
contents of the others, even NaN, do not affect the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edge.ops import DEVICE_DOMAIN, Op, state, value
from edge.plugins.attention.statement import ATTENTION as STATED
from edge.plugins.attention.statement import ATTENTION_F16, ROPE, in_f16
from edge.plugins.device.rules import ANCESTORS, RUN, after, device
from edge.plugins.device.text import CONSTANTS, call, fields, views


def statements() -> Iterator[Op]:
    """Yield attention with and without RoPE. RoPE alone is not a device op."""
    for attention in (_attention(STATED), _attention(ATTENTION_F16)):
        yield attention
        yield replace(
            attention,
            name=f"Rotary{attention.name}",
            inputs=(*attention.inputs, *ROPE.without("x")),
            attributes=(*attention.attributes, *(a for a in ROPE.attributes if a.name == "dim")),
            maths=f"q, k = {ROPE.name}(q), {ROPE.name}(k)\n{attention.maths}",
            source=f"{ROPE.name}, then {attention.name}",
        )


def _attention(op: Op) -> Op:
    """Return attention that writes k and v to cache slots from run[PAST] on, after the past."""
    caches = tuple(
        state(v.name, "f32[B,KV,C,P]", "slots below run[PAST] are valid")
        for v in op.inputs
        if v.role == "state"
    )
    if op is ATTENTION_F16:
        caches = tuple(map(in_f16, caches))
    activations = tuple(
        value(v.name, f"f32[T,B,{v.shape[-1]}]", v.doc)
        for v in op.inputs
        if v.name in ("q", "k", "v")
    )
    y = value("y", "f32[T,B,H·P]", "")
    return device(
        op,
        (*activations, *caches, RUN, ANCESTORS),
        (y, *map(after, caches)),
        "slots run[PAST] … run[PAST]+T-1 of the caches get k and v\n"
        "y = softmax(scale · q·Kᵀ) · V over the slots below run[PAST] and those of the run that "
        "are t or, for a chain, before it, for a tree, on its path; unless window is 0, over the "
        "last `window` of these; unless softcap is 0, of softcap · tanh(score / softcap)",
    )


# -- bodies ----------------------------------------------------------------------------------------

_APPEND = """
    heads_0 = Constant<value_int: int = @heads>()
    heads_1 = Reshape(heads_0, end)
    kv_0 = Constant<value_int: int = @kv_heads>()
    kv_1 = Reshape(kv_0, end)
    stay_2 = Constant<value = int64[2] {0, 0}>()
    q_shape = Concat<axis=0>(stay_2, heads_1, end)
    kv_shape = Concat<axis=0>(stay_2, kv_1, end)
    q_tbhp = Reshape(q_own, q_shape)
    k_tbhp = Reshape(k_own, kv_shape)
    v_tbhp = Reshape(v_own, kv_shape)
    q_bhtp = Transpose<perm=[1, 2, 0, 3]>(q_tbhp)
    k_bhtp = Transpose<perm=[1, 2, 0, 3]>(k_tbhp)
    v_bhtp = Transpose<perm=[1, 2, 0, 3]>(v_tbhp)
    new_size = Shape<end=1>(q)
    new_count = Squeeze(new_size)
    slot_size = Shape<start=2, end=3>(key_cache)
    slot_count = Squeeze(slot_size)
    slot = Range(from_0, slot_count, by_1)
    late = Sub(slot, past)
    is_past = Less(late, from_0)
    is_known = Less(late, new_count)
    is_later = Not(is_past)
    is_new = And(is_later, is_known)
    new_place = Add(slot_count, late)
    slot_from = Where(is_new, new_place, slot)
    keys_grown = Concat<axis=2>(key_cache, k_bhtp)
    values_grown = Concat<axis=2>(value_cache, v_bhtp)
    key_cache_out = Gather<axis=2>(keys_grown, slot_from)
    value_cache_out = Gather<axis=2>(values_grown, slot_from)
"""

# sees [T, C]: which slots each token attends to
_VISIBLE = """
    token = Range(from_0, new_count, by_1)
    token_column = Unsqueeze(token, axis_1)
    is_before = LessOrEqual(late, token_column)
    tree_size = Shape<end=1>(ancestors)
    tree_count = Squeeze(tree_size)
    tree_last = Sub(tree_count, by_1)
    tree_token = Min(token, tree_last)
    late_enough = Max(late, from_0)
    tree_late = Min(late_enough, tree_last)
    tree_rows = Gather<axis=0>(ancestors, tree_token)
    leads = Gather<axis=1>(tree_rows, tree_late)
    leads_not = Constant<value = int32 {0}>()
    is_on_path = Greater(leads, leads_not)
    is_tree = Greater(tree_count, by_1)
    is_chain = Not(is_tree)
    by_path = And(is_tree, is_on_path)
    by_order = And(is_chain, is_before)
    is_seen = Or(by_path, by_order)
    is_seen_new = And(is_new, is_seen)
    sees_all = Or(is_past, is_seen_new)
    path = Cast<to=7>(ancestors)
    path_sizes = ReduceSum<keepdims=0>(path, axis_1)
    depths = Sub(path_sizes, by_1)
    token_deep = Gather(depths, tree_token)
    token_place = Where(is_tree, token_deep, token)
    late_deep = Gather(depths, tree_late)
    is_deep = And(is_tree, is_new)
    late_place = Where(is_deep, late_deep, late)
    token_place_column = Unsqueeze(token_place, axis_1)
    behind = Sub(token_place_column, late_place)
    window_0 = Constant<value_int: int = @window>()
    is_near = Less(behind, window_0)
    is_endless = Equal(window_0, from_0)
    is_within = Or(is_near, is_endless)
    sees = And(sees_all, is_within)
"""

_ATTEND = """
    known_4 = Constant<value = int64[2] {-1, 1}>()
    known_column = Reshape(is_known, known_4)
    nothing = Constant<value = float {0.0}>()
    values = Where(known_column, value_cache_out, nothing)
    head = Range(from_0, heads_0, by_1)
    share = Div(heads_0, kv_0)
    group = Div(head, share)
    K_heads = Gather<axis=1>(key_cache_out, group)
    V_heads = Gather<axis=1>(values, group)
    K_t = Transpose<perm=[0, 1, 3, 2]>(K_heads)
    raw = MatMul(q_bhtp, K_t)
    factor = Constant<value_float: float = @scale>()
    scaled = Mul(raw, factor)
    softcap_0 = Constant<value_float: float = @softcap>()
    share_of_cap = Div(scaled, softcap_0)
    bounded = Tanh(share_of_cap)
    capped = Mul(bounded, softcap_0)
    is_capped = Greater(softcap_0, nothing)
    raised = Where(is_capped, capped, scaled)
    never = Constant<value = float {-3e38}>()
    scores = Where(sees, raised, never)
    shares = Softmax<axis=-1>(scores)
    y_bhtp = MatMul(shares, V_heads)
    y_tbhp = Transpose<perm=[2, 0, 1, 3]>(y_bhtp)
    flat = Constant<value = int64[3] {0, 0, -1}>()
    y = Reshape(y_tbhp, flat)
"""

_PROLOGUE = CONSTANTS + views(["q", "k", "v"]) + fields("past")
ATTENTION = _PROLOGUE + _APPEND + _VISIBLE + _ATTEND

_WIDE = {"key_cache_out": "keys_wide", "value_cache_out": "values_wide"}
_CASTS = "".join(f"    {wide} = Cast<to=1>({kept})\n" for kept, wide in _WIDE.items())


def attention_f16() -> str:
    append, attend = _APPEND, _ATTEND
    for name in ("k_bhtp", "v_bhtp"):
        append = append.replace(f", {name})", f", {name}_f16)").replace(
            "    new_size", f"    {name}_f16 = Cast<to=10>({name})\n    new_size"
        )
    for cache, wide in _WIDE.items():
        attend = attend.replace(cache, wide)
    return _PROLOGUE + append + _VISIBLE + _CASTS + attend


# The functional op rotates q and k batch first.
_ROTATED = """
    {x}_b = Transpose<perm=[1, 0, 2]>({x}_own)
    {x}_turned = edge.Rope<heads: int = @{heads}, head_dim: int = @head_dim, dim: int = @dim>
        ({x}_b, cos, sin)
    {x}_t = Transpose<perm=[1, 0, 2]>({x}_turned)
"""


def rotary_attention() -> str:
    return _rotary(STATED)


def rotary_attention_f16() -> str:
    return _rotary(ATTENTION_F16)


def _rotary(attention: Op) -> str:
    return (
        CONSTANTS
        + views(["q", "k"])
        + _ROTATED.format(x="q", heads="heads")
        + _ROTATED.format(x="k", heads="kv_heads")
        + call(
            attention.name,
            _attention(attention),
            {"q": "q_t", "k": "k_t"},
            {},
            DEVICE_DOMAIN,
            q_start="0",
            k_start="0",
        )
    )
