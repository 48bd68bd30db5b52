"""LFM3: like LFM2, with norms before and after, windows, and a gate on every head of attention.

Source: transformers 5.23 models/lfm3, `Lfm3ForCausalLM`, whose g_proj is gate_proj in files. Full
attention has proportional RoPE: of the pairs of values half a head apart, only the first rotate, by
the frequencies of a whole head. Here the rotated values come first in a head: rows of queries and
keys are permuted alike, which does not change scores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge.config import AttentionConfig, MlpConfig, RopeConfig, RopeScaling
from edge.export.checkpoint.families import lfm2
from edge.export.checkpoint.family import (
    SLIDING,
    Family,
    attention,
    for_kind,
    known_only,
    layer_types,
    positions,
    rope,
    whole,
    windows,
)
from edge.export.checkpoint.fields import UNSUPPORTED, Fields
from edge.export.checkpoint.layout import Layout
from edge.mixers.base import MixerConfig, Norms

NAME = "lfm3"
FULL = "full_attention"
_OWN = {
    "attention_bias", "conv_L_cache", "conv_bias", "head_dim", "layer_types", "norm_eps",
    "sliding_window", "use_attention_gate", "use_sandwich_norm",
}  # fmt: skip
_KINDS = ("conv", FULL, SLIDING)
_THETA = {FULL: 1e6, SLIDING: 1e4}
_PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
_WINDOW = 256


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    kinds = _kinds(fields)
    size = fields.integer("head_dim", 128)
    context = positions(for_kind(fields, FULL), 128000)
    norms: Norms = "both" if fields.boolean("use_sandwich_norm", True) else "before"
    bias = fields.boolean("attention_bias", False)
    attn = attention(
        fields, kv_heads=4, size=size, bias=bias, norms=norms, qk_norm=True,
        head_gate=fields.boolean("use_attention_gate", True),
    )  # fmt: skip
    ropes = {kind: _rope(fields, kind, size) for kind in _THETA if kind in kinds}
    conv = lfm2.short_conv(fields, 7, norms)
    mlp = fields.build(MlpConfig, d_intermediate=fields.integer("intermediate_size"), norms=norms)
    sliding = windows(fields, kinds, context, _WINDOW) or [None] * len(kinds)
    layers: list[MixerConfig] = []
    for kind, window in zip(kinds, sliding, strict=True):
        update: dict[str, Any] = {"rope": ropes.get(kind), "window": window}
        layers += [conv if kind == "conv" else attn.model_copy(update=update), mlp]
    config = whole(fields, NAME, layers, norm="norm_eps", tied=True, context=context)
    layout = lfm2.place(config, {})
    for index, layer in layout.config.layers_of(AttentionConfig).items():
        _place_attention(layout, f"layers.{index}", layer)
    return layout


def _kinds(fields: Fields) -> list[str]:
    """Return each block's first mixer. By default, every four blocks are a window, full attention,
    and two convolutions."""
    blocks = fields.blocks()
    if fields.values.get("layer_types") is not None:
        return layer_types(fields, blocks, {kind: kind for kind in _KINDS}, "conv")
    pattern = {0: SLIDING, 2: FULL}
    return [pattern.get(block % 4, "conv") if block else "conv" for block in range(blocks)]


def _rope(fields: Fields, kind: str, size: int) -> RopeConfig | None:
    """Return the RoPE of one kind of attention, or None if no pair of values rotates."""
    section = fields.section("rope_parameters").section(kind)
    if kind == FULL and fields.values.get("rope_parameters") is None:
        section.values = _PROPORTIONAL
    if section.values.get("rope_type") == "proportional":
        return _proportional(section, size)
    rotation = rope(for_kind(fields, kind, theta=_THETA[kind]), size)
    if rotation.dim != size:
        section.inconsistent("partial_rotary_factor", "is not 1", UNSUPPORTED)
    return rotation


def _proportional(section: Fields, size: int) -> RopeConfig | None:
    """Return a RoPE that rotates a share of a head of `size`, by frequencies theta^(-2i/size)."""
    section.known_only({*_PROPORTIONAL, "factor"})
    theta, share = section.number("rope_theta", 1e6), section.number("partial_rotary_factor", 1.0)
    if theta <= 0:
        section.stop("rope_theta", f"is {theta}, not above 0")
    if not 0 <= share <= 1:
        section.stop("partial_rotary_factor", f"is {share}, outside 0 to 1")
    rotated_dim = 2 * int(share * size // 2)
    factor = section.number("factor", 1.0)
    scaling = None if factor == 1 else section.build(RopeScaling, kind="linear", factor=factor)
    if rotated_dim == 0:
        return None
    return section.build(
        RopeConfig, theta=theta ** (rotated_dim / size), dim=rotated_dim, scaling=scaling
    )


def _place_attention(layout: Layout, ours: str, layer: AttentionConfig) -> None:
    gate = f"{ours}.gate_proj.bias"  # absent in files
    if layout.pieces.pop(gate, None) is not None:
        layout.constants[gate] = 0.0
    size, rotated_dim = layer.head_dim, layer.rope.dim if layer.rope else layer.head_dim
    if rotated_dim == size:
        return
    order = _rotated_first(size, rotated_dim)
    for module, heads in (("q", layer.n_heads), ("k", layer.n_kv_heads)):
        rows = tuple(head * size + row for head in range(heads) for row in order)
        places = {f"{module}_proj.{kind}": rows for kind in layout.kinds(f"{ours}.{module}_proj")}
        for name, row_order in (places | {f"{module}_norm.weight": order}).items():
            piece = layout.pieces[f"{ours}.{name}"]
            layout.pieces[f"{ours}.{name}"] = replace(piece, rows=row_order)


def _rotated_first(size: int, rotated_dim: int) -> tuple[int, ...]:
    """Return the order of a head's values that puts the rotated ones, half of each half, first."""
    half, pairs = size // 2, rotated_dim // 2
    first = [*range(pairs), *range(half, half + pairs)]
    return (*first, *range(pairs, half), *range(half + pairs, size))


FAMILY = Family.of_transformers(NAME, "Lfm3ForCausalLM", read)
