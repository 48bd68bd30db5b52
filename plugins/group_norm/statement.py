"""Statements of RMSNorm of adjacent values: of every head, or of dt, B and C."""

from edge.ops import Attribute, Op, value, weight

PARTS_RMS_NORM = Op(
    "PartsRMSNorm",
    (value("x", "f32[T,B,D]", "low-rank dt, B and C"), weight("weight", "f32[D]", "")),
    (value("y", "f32[T,B,D]", "normed"),),
    (
        Attribute("eps", "float", "added to the mean square"),
        Attribute("first", "int", "size of the first part; the other two halve the rest"),
    ),
    "y = weight · x / sqrt(mean_part(x²) + eps)",
    "Jamba, arXiv 2403.19887, section 6.4; Falcon Mamba, arXiv 2410.05355, without weights",
)

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
