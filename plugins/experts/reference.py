"""Routing, products with the chosen experts, one expert after the other, and their sum, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edge.plugins.linear.reference import (
    linear,
    linear_bits,
    linear_bits_minimum,
    linear_int4,
    linear_int4_minimum,
    linear_int8,
)
from edge.plugins.quantize.reference import quantize_rows


def route(
    logits: Tensor,
    bias: Tensor,
    k: int,
    sigmoid: int,
    normalise: int,
    scale: float,
    groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """Choose experts: logits f32 [..., E], bias [E] → chosen i32 [..., k], gates f32 [..., k]."""
    score = logits.sigmoid() if sigmoid else logits.softmax(-1)
    ranked = score + bias
    if groups > 1:
        grouped = ranked.unflatten(-1, (groups, -1))
        group_scores = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        best_groups = _top_indices(group_scores, top_groups)
        excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best_groups, False)
        ranked = grouped.masked_fill(excluded[..., None], -torch.inf).flatten(-2)
    chosen = _top_indices(ranked, k)
    gates = score.gather(-1, chosen)
    if normalise:
        gates = gates / gates.sum(-1, keepdim=True)
    return chosen.int(), gates * scale


def expert_order(chosen: Tensor) -> Tensor:
    """Sort pairs by expert: chosen i32 [..., k] → pair numbers in the same shape."""
    order = chosen.flatten().sort(stable=True).indices
    return order.int().reshape(chosen.shape)


def _top_indices(x: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values, in descending order, equal ones by index."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def expert_linear(x: Tensor, chosen: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Multiply x [..., K] or [..., k·K] by weight[chosen], weight [E, N, K] → [..., k·N]."""
    return _by_expert(x, chosen, weight.shape[2], parts, lambda x, e: linear(x, weight[e]))


def expert_linear_bits(
    x: Tensor, chosen: Tensor, packed: Tensor, scales: Tensor, parts: int, K: int, bits: int
) -> Tensor:
    return _by_expert(x, chosen, K, parts, lambda x, e: linear_bits(x, packed[e], scales[e], bits))


def expert_linear_bits_minimum(
    x: Tensor, chosen: Tensor, packed: Tensor, scales: Tensor, minimums: Tensor, parts: int, K: int
) -> Tensor:
    def product(x: Tensor, e: int) -> Tensor:
        return linear_bits_minimum(x, packed[e], scales[e], minimums[e])

    return _by_expert(x, chosen, K, parts, product)


def expert_linear_int8(
    x: Tensor, chosen: Tensor, weight: Tensor, weight_scale: Tensor, parts: int
) -> Tensor:
    return _by_expert(
        x,
        chosen,
        weight.shape[2],
        parts,
        lambda x, e: linear_int8(*quantize_rows(x), weight[e], weight_scale[e]),
    )


def expert_linear_int4(
    x: Tensor, chosen: Tensor, packed: Tensor, scales: Tensor, parts: int, K: int
) -> Tensor:
    return _by_expert(
        x, chosen, K, parts, lambda x, e: linear_int4(*quantize_rows(x), packed[e], scales[e])
    )


def expert_linear_int4_minimum(
    x: Tensor, chosen: Tensor, packed: Tensor, scales: Tensor, minimums: Tensor, parts: int, K: int
) -> Tensor:
    def product(x: Tensor, e: int) -> Tensor:
        return linear_int4_minimum(*quantize_rows(x), packed[e], scales[e], minimums[e])

    return _by_expert(x, chosen, K, parts, product)


def _by_expert(
    x: Tensor, chosen: Tensor, K: int, parts: int, product: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Apply `product` to the rows of every chosen expert, in the order of the statement."""
    slots = chosen.shape[-1]
    rows = x.reshape(*chosen.shape[:-1], -1, K).expand(*chosen.shape, K)
    outputs: Tensor | None = None
    for expert in chosen.unique().tolist():
        selected = chosen == expert
        y = product(rows[selected], expert)
        if outputs is None:
            outputs = y.new_empty(*chosen.shape, y.shape[-1])
        outputs[selected] = y
    assert outputs is not None
    by_part = outputs.unflatten(-1, (parts, -1)).transpose(-3, -2)
    return by_part.reshape(*chosen.shape[:-1], slots * outputs.shape[-1])


def expert_sum(x: Tensor, gates: Tensor) -> Tensor:
    """Sum the slots of x weighted by gates: x [..., k·N], gates [..., k] → [..., N]."""
    return (x.unflatten(-1, (gates.shape[-1], -1)) * gates[..., None]).sum(-2)
