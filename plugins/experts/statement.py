"""Statements of a mixture of experts: routing, products with the chosen experts, their sum.

A token has k slots, one for each expert it is routed to. A row has the values of all slots side by
side: [..., k·N]. The weights of the X experts are stacked: [X, N, K].
"""

from __future__ import annotations

from dataclasses import replace

from edge.ops import Attribute, Op, Value, index, value, weight
from edge.plugins.linear.statement import BITS, FROM_MINIMUM, PACKED, SCALES
from edge.plugins.quantize.statement import ROUND

_X = value("x", "f32[...,J·K]", "one row of K for all slots of a token (J = 1), or k rows (J = k)")
_CHOSEN = index("chosen", "i32[...,k]", "the expert of each slot, 0 to X-1")
_ORDER = index("order", "i32[...,k]", "row·k + slot of every pair, sorted by expert")
_Y = value("y", "f32[...,k·N]", "[parts, k, N/parts] in a row")

_PARTS = Attribute(
    "parts", "int", "number of matrices stacked along the rows of each expert's weight"
)

ROUTE = Op(
    "Route",
    (
        value("logits", "f32[...,X]", "router logits"),
        weight("bias", "f32[X]", "added to scores for the choice only"),
    ),
    (
        index("chosen", "i32[...,k]", "experts, best first, equal ones by number"),
        value("gates", "f32[...,k]", "weight of each chosen expert"),
    ),
    (
        Attribute("k", "int", "experts per token"),
        Attribute("sigmoid", "int", "1: scores are sigmoids; 0: a softmax"),
        Attribute("normalise", "int", "1: gates are divided by their sum"),
        Attribute("scale", "float", "factor of the gates"),
        Attribute("groups", "int", "number of groups of experts; divides X", (1, None)),
        Attribute("top_groups", "int", "number of groups that a token may choose from"),
    ),
    "score = sigmoid(logits), or softmax(logits); s = score + bias\n"
    "a group is worth the sum of its two largest s; outside the top_groups best ones s = -inf\n"
    "chosen = indices of the k largest s; gates = score[chosen]\n"
    "gates = scale · gates, with normalise over their sum",
    "Mixtral, arXiv 2401.04088, section 2.1; DeepSeek-V3, arXiv 2412.19437, equations 12 to 16",
)

EXPERT_ORDER = Op(
    "ExpertOrder",
    (_CHOSEN,),
    (_ORDER,),
    (Attribute("experts", "int", "X"),),
    "order = numbers row·k + slot, sorted by chosen, then as they come",
    "MegaBlocks, arXiv 2211.15841, section 5.2 (what gathers the rows of an expert)",
)


def _per_expert(values: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(replace(v, shape=("X", *v.shape)) for v in values)


def _product(
    name: str, weights: tuple[Value, ...], maths: str, source: str, *attributes: Attribute
) -> Op:
    return Op(name, (_X, _CHOSEN, _ORDER, *weights), (_Y,), (_PARTS, *attributes), maths, source)


_SLOT = "y of slot j = x (of slot j, if each has its own) · w[chosen[j]]ᵀ"

EXPERT_LINEAR = _product(
    "ExpertLinear",
    (weight("weight", "f32|f16[X,N,K]", "rows are outputs"),),
    f"{_SLOT}, w = weight; an implementation may round x as one of Linear",
    "torch.nn.Linear without bias, an expert's",
)

EXPERT_LINEAR_BITS = _product(
    "ExpertLinearBits",
    _per_expert((PACKED, SCALES)),
    f"{_SLOT}, w as in LinearBits; an implementation may round x as one of LinearBits",
    "com.microsoft.MatMulNBits, an expert's",
    *BITS,
)

_FOUR = tuple(replace(attribute, forms=()) for attribute in BITS)

EXPERT_LINEAR_BITS_MINIMUM = _product(
    "ExpertLinearBitsMinimum",
    _per_expert(FROM_MINIMUM),
    f"{_SLOT}, w as in LinearBitsMinimum; an implementation may round x as that; bits is 4",
    "Q4_1 of llama.cpp, an expert's",
    *_FOUR,
)

_ROWS = (
    f"q = {ROUND.format('x / step')}, step = absmax(x) / 127 of each row of K, 1 where that is 0"
)

EXPERT_LINEAR_INT8 = _product(
    "ExpertLinearInt8",
    (
        weight("weight", "i8[X,N,K]", "rows are outputs"),
        weight("weight_scale", "f32[X,N]", "one per row of weight"),
    ),
    f"{_ROWS}\n{_SLOT}, with q · step for x and weight · weight_scale for w; sums of integers are "
    "exact",
    "LLM.int8(), arXiv 2208.07339, section 3.1 (vector-wise quantization)",
)

EXPERT_LINEAR_INT4 = _product(
    "ExpertLinearInt4",
    _per_expert((PACKED, SCALES)),
    f"{_ROWS}\n{_SLOT}, with q · step for x and w as in LinearInt4; sums of a block are exact; "
    "bits is 4",
    "Quamba2, arXiv 2503.22879 (W4A8), with a scale a token",
    *_FOUR,
)

EXPERT_LINEAR_INT4_MINIMUM = _product(
    "ExpertLinearInt4Minimum",
    EXPERT_LINEAR_BITS_MINIMUM.without("x", "chosen", "order"),
    f"{_ROWS}\n{_SLOT}, with q · step for x and w as in LinearInt4Minimum; sums of a block are "
    "exact; bits is 4",
    "ExpertLinearInt4, with blocks as LinearBitsMinimum has them",
    *_FOUR,
)

EXPERT_SUM = Op(
    "ExpertSum",
    (
        value("x", "f32[...,k·N]", "values of every slot"),
        value("gates", "f32[...,k]", "weight of each slot"),
    ),
    (value("y", "f32[...,N]", ""),),
    (),
    "y = Σ_j gates[j] · x of slot j",
    "Mixtral, arXiv 2401.04088, section 2.1",
)
