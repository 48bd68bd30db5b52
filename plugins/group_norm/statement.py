"""RMSNorm of neighbouring values, such as those of a head."""

from __future__ import annotations

from edge.ops import Attribute, Op, value, weight

GROUP_RMS_NORM = Op(
    "GroupRMSNorm",
    (value("x", "f32[T,B,D]", "activations"), weight("weight", "f32[D]", "")),
    (value("y", "f32[T,B,D]", "normed"),),
    (
        Attribute("eps", "float", "added to the mean square"),
        Attribute("groups", "int", "the mean square is over D/groups values"),
    ),
    "y = weight · x / sqrt(mean_group(x²) + eps)",
    "Query-key normalization, arXiv 2010.04245, with an RMSNorm (arXiv 1910.07467) a head",
)
