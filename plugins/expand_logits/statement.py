"""Expand logits: from the ids that a head computes to a whole vocabulary."""

from edge.ops import Op, value, weight

EXPAND_LOGITS = Op(
    "ExpandLogits",
    (
        value("x", "f32[...,K]", "logits of K ids"),
        weight("index", "i32[V]", "each id's column of x, or -1"),
    ),
    (value("y", "f32[...,V]", "logits of all ids"),),
    (),
    "y[v] = x[index[v]] if index[v] ≥ 0, else min x",
    "FR-Spec, arXiv 2502.14856, section 3; there the other ids have no logit",
)
