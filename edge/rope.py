"""Angles per position of the rotary embedding, computed in fp32 as in every engine."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edge.config import RopeConfig, RopeScaling

F32 = NDArray[np.float32]


def powers(theta: float, dim: int) -> F32:
    """Return theta^(-2i/dim), [dim/2] (RoFormer, arXiv 2104.09864, equation 15)."""
    exponents = -np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # NumPy's fp32 powers differ in a bit between processors
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def inverse_frequencies(rope: RopeConfig) -> F32:
    """Return the factors from positions to angles, [dim/2]."""
    inverse = powers(rope.theta, rope.dim)
    if rope.scaling is None:
        return inverse
    if rope.scaling.kind == "linear":
        return inverse / np.float32(rope.scaling.factor)
    if rope.scaling.kind == "each":
        divided: F32 = np.divide(inverse, np.array(rope.scaling.factors, np.float32))
        return divided
    if rope.scaling.kind == "yarn":
        return _yarn(inverse, rope, rope.scaling)
    return _llama3(inverse, rope.scaling)


def _llama3(inverse: F32, scaling: RopeScaling) -> F32:
    """Scale as Llama 3.1: meta-llama/llama-models, models/llama3/model.py, apply_scaling."""
    turns = np.float32(scaling.original_context) * inverse / np.float32(2 * math.pi)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    share = np.clip((turns - low) / (high - low), np.float32(0), np.float32(1))
    changed: F32 = inverse * (share + (1 - share) / np.float32(scaling.factor))
    return changed


def _yarn(inverse: F32, rope: RopeConfig, scaling: RopeScaling) -> F32:
    """Scale by YaRN's "NTK by parts" (arXiv 2309.00071, section 3.2), as transformers does."""

    def pair(turns: float) -> float:
        """Return the index of the pair that makes `turns` turns in the original context."""
        share = math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(rope.theta)
        return rope.dim * share / 2

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    pairs = np.arange(rope.dim // 2, dtype=np.float32)
    divided = np.clip((pairs - first) / ((last - first) or 0.001), 0, 1).astype(np.float32)
    changed: F32 = inverse * (1 - divided) + inverse / np.float32(scaling.factor) * divided
    return changed
