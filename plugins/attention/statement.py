"""Statements of rotary embedding, and of attention over a KV cache that is updated in place."""

from __future__ import annotations

from dataclasses import replace

from edge.ops import Attribute, Op, Value, index, state, value

_SCALE = Attribute("scale", "float", "factor of q·k; 1/sqrt of the head_dim before any padding")

ROPE = Op(
    "Rope",
    (
        value("x", "f32[B,T,H·P]", "queries or keys"),
        value("cos", "f32[T,dim/2]", "cos(position[t] · theta^(-2i/dim))"),
        value("sin", "f32[T,dim/2]", "sin of the same"),
    ),
    (value("y", "f32[B,T,H·P]", "rotated"),),
    (
        Attribute("heads", "int", "H"),
        Attribute("head_dim", "int", "P"),
        Attribute("dim", "int", "number of values rotated, the first of each head; even"),
    ),
    "per head: a = x[:dim/2], b = x[dim/2:dim]\ny = concat(a·cos - b·sin, b·cos + a·sin, x[dim:])",
    "RoFormer, arXiv 2104.09864, equation 34, halves rotated as in GPT-NeoX",
)

ATTENTION = Op(
    "Attention",
    (
        value("q", "f32[B,T,H·P]", "queries, rotated"),
        value("k", "f32[B,T,KV·P]", "keys, rotated"),
        value("v", "f32[B,T,KV·P]", "values"),
        state("key_cache", "f32[B,KV,capacity,P]", "slots below past are valid"),
        state("value_cache", "f32[B,KV,capacity,P]", "likewise"),
        index("last", "i32[B]", "past + T - 1, the last slot that is valid after this run"),
        index("total", "i32[]", "past + T"),
        value("bias", "f32[1,1,T,past+T]", "0 where a query may attend, very negative elsewhere"),
    ),
    (
        value("y", "f32[B,T,H·P]", ""),
        state("key_cache_out", "f32[B,KV,capacity,P]", "slots past … past+T-1 hold k; an engine "
              "binds it to the buffer of key_cache"),
        state("value_cache_out", "f32[B,KV,capacity,P]", "likewise"),
    ),
    (
        Attribute("heads", "int", "H"),
        Attribute("kv_heads", "int", "KV; divides H"),
        Attribute("head_dim", "int", "P, a multiple of 8"),
        _SCALE,
        Attribute("window", "int", "positions a query attends to, its own included, as in bias; "
                  "0: all", absent=0),
        Attribute("softcap", "float", "bound that scores approach, before bias; 0: none", absent=0),
    ),
    "K, V = the caches' first past+T slots, the last T being k and v\n"
    "y = softmax(cap(scale · q·Kᵀ) + bias) · V, cap(s) = softcap · tanh(s / softcap)\n"
    "slots beyond past+T are never read. B must be 1 when T > 1 and past > 0",
    "Attention is all you need, arXiv 1706.03762, equation 1; GQA, arXiv 2305.13245; "
    "soft caps: Gemma 2, arXiv 2408.00118, section 2",
)  # fmt: skip


def in_f16(v: Value) -> Value:
    """Return a cache in fp16; any other value unchanged."""
    return replace(v, dtypes=("f16",)) if v.role == "state" else v


ATTENTION_F16 = replace(
    ATTENTION,
    name="AttentionF16",
    inputs=tuple(map(in_f16, ATTENTION.inputs)),
    outputs=tuple(map(in_f16, ATTENTION.outputs)),
    maths=f"k, v = f16(k), f16(v), half to even, before they are read\n{ATTENTION.maths}",
)
