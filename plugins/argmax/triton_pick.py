"""The largest logits of each row and their tokens, in descending order, equal ones by ascending
token.

A logit and its token form a 64-bit key that sorts in this order. Two launches find the largest
keys: first those of every block of the vocabulary, then those of the row. NaN sorts as the largest
logit, so it is always found; the ids of its row are then -1.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(logit, token):
    """Return i64 keys: the logit's bits as an ordered int32, above the inverted token."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = tl.where(logit != logit, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def best(keys, COUNT: tl.constexpr):
    """Return the COUNT largest keys in descending order; COUNT is a power of 2."""
    return tl.max(keys, 0, keep_dims=True) if COUNT == 1 else tl.topk(keys, COUNT)


@triton.jit
def blocks(
    logits,  # f32 [rows, STRIDE]
    keys,  # i64 [rows, blocks of the vocabulary, COUNT]
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * STRIDE + token, mask=token < V, other=0.0)
    found = best(tl.where(token < V, key_of(logit, token), -0x8000000000000000), COUNT)
    place = (row * tl.num_programs(1) + tl.program_id(1)) * COUNT
    tl.store(keys + place + tl.arange(0, COUNT), found)


@triton.jit
def pick(
    keys,  # i64 [rows, FOUND]
    values,  # f32 [rows, K], or None
    ids,  # i32 [rows, K]
    FOUND: tl.constexpr,
    K: tl.constexpr,
    COUNT: tl.constexpr,  # a power of 2, at least K
    BLOCK: tl.constexpr,  # a power of 2, at least FOUND
):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    found = best(
        tl.load(keys + row.to(tl.int64) * FOUND + i, mask=i < FOUND, other=-0x8000000000000000),
        COUNT,
    )
    ordered = (found >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    spoiled = tl.max(ordered, 0) == 0x7FFFFFFF
    token = 0x7FFFFFFF - (found & 0x7FFFFFFF).to(tl.int32)
    rank = tl.arange(0, COUNT)
    tl.store(ids + row * K + rank, tl.where(spoiled, -1, token), mask=rank < K)
    if values is not None:
        value = bits.to(tl.float32, bitcast=True)
        tl.store(values + row * K + rank, value, mask=rank < K)
