"""Device op for the best token of a row. Only the device graph has this op."""

from __future__ import annotations

from collections.abc import Iterator

from edge.ops import Op, value


def statements() -> Iterator[Op]:
    yield Op(
        "Greedy",
        (value("logits", "f32[L,B,V]", ""),),
        (value("picked", "i32[L,B]", "the best token of each row"),),
        (),
        "picked = the lowest v of the largest logits[…,v]; -1 where one of them is NaN",
        "ONNX ArgMax",
    )


# The lowest of equal logits wins; ArgMax leaves the choice to the runtime.
GREEDY = """
    from_0 = Constant<value = int64 {0}>()
    by_1 = Constant<value = int64 {1}>()
    last = Constant<value = int64[1] {-1}>()
    width_1 = Shape<start=-1>(logits)
    width = Squeeze(width_1)
    ids_long = Range(from_0, width, by_1)
    ids = Cast<to=6>(ids_long)
    beyond = Cast<to=6>(width)
    largest = ReduceMax<keepdims=1>(logits, last)
    is_largest = Equal(logits, largest)
    candidates = Where(is_largest, ids, beyond)
    best = ReduceMin<keepdims=0>(candidates, last)
    is_nan = IsNaN(logits)
    nans = Cast<to=6>(is_nan)
    any_nan = ReduceMax<keepdims=0>(nans, last)
    no_nan = Constant<value = int32 {0}>()
    has_nan = Greater(any_nan, no_nan)
    none = Constant<value = int32 {-1}>()
    picked = Where(has_nan, none, best)
"""
