"""Grouped-query attention. q, k and v are one product; the caches are written in place."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge.export.mixers.base import (
    Array,
    Conv1d,
    Fetch,
    MixerExport,
    Scale,
    State,
    Stored,
)
from edge.export.mixers.mamba import convolution
from edge.export.nodes.builder import F32
from edge.export.nodes.layer import LayerGraph
from edge.export.nodes.products import ProductInput
from edge.export.quantize.layer_plan import LayerPlanner, Matrix
from edge.export.quantize.plan import LayerPlan
from edge.export.training_ops import rms_norm_training
from edge.mixers.attention import AttentionConfig
from edge.plugins.attention.reference import attention, rope
from edge.plugins.causal_conv1d.reference import causal_conv_plain
from edge.plugins.gated_norm.reference import head_gate
from edge.plugins.norm.reference import rms_norm
from edge.rope import inverse_frequencies
from edge.tensors import padded_head_dim

_NORMS = {"q_norm": "q_proj", "k_norm": "k_proj"}


class Attention(nn.Module):
    """State: key_cache and value_cache [B, n_kv_heads, tokens so far, P], keys already rotated."""

    def __init__(self, config: AttentionConfig, d_model: int, eps: float) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        d_in = config.input_width(d_model)
        self.q_proj = nn.Linear(d_in, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d_in, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d_in, kv, bias=config.qkv_bias)
        if config.gates:
            self.gate_proj = nn.Linear(d_in, config.gates, bias=config.qkv_bias)
        if config.d_conv is not None:
            self.conv1d = Conv1d(config.conv_channels, config.d_conv, True)
        if config.qk_norm:
            self.q_norm = Scale(q if config.qk_whole else config.head_dim)
            self.k_norm = Scale(kv if config.qk_whole else config.head_dim)
        self.o_proj = nn.Linear(q, d_model, bias=config.out_bias)
        self._inverse: Tensor | None = None

    def _frequencies(self, device: torch.device) -> Tensor:
        """Inverse frequencies of RoPE, fp32 whatever the weights are.

        Kept on the device: a copy from the host cannot be recorded into a CUDA graph.
        """
        assert self.config.rope is not None
        if self._inverse is None or self._inverse.device != device:
            self._inverse = torch.from_numpy(inverse_frequencies(self.config.rope)).to(device)
        return self._inverse

    def forward(self, u: Tensor, state: State, position: int) -> tuple[Tensor, State]:
        c = self.config
        parts, conv = [p(u) for p in (self.q_proj, self.k_proj, self.v_proj)], {}
        if c.d_conv is not None:
            joined, conv["conv_state"] = causal_conv_plain(
                torch.cat(parts, -1), state["conv_state"], self.conv1d.weight, self.conv1d.bias
            )
            parts = list(joined.split([part.shape[-1] for part in parts], dim=-1))
        if c.qk_whole:
            parts[:2] = self._normed(*parts[:2])
        q, k, v = (part.unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for part in parts)
        if c.qk_norm and not c.qk_whole:
            q, k = self._normed(q, k)
        if c.rope is not None:
            positions = torch.arange(position, position + u.shape[1], device=u.device)
            q, k = (rope(m, positions, self._frequencies(u.device)) for m in (q, k))
        k = torch.cat([state["key_cache"].to(k.dtype), k], dim=2)
        v = torch.cat([state["value_cache"].to(v.dtype), v], dim=2)
        whole = k.shape[2] == u.shape[1]
        if c.window is not None or c.softcap is not None:
            mask = _causal_mask(c.window, u.shape[1], k.shape[2]).to(u.device)
            y = attention(q, k, v, mask, softcap=c.softcap)
        elif (whole and torch.is_grad_enabled()) or (u.is_cuda and (whole or u.shape[1] == 1)):
            # on a GPU a mask rules out the kernel that does not store the scores
            y = F.scaled_dot_product_attention(q, k, v, is_causal=whole, enable_gqa=True)
        else:
            y = attention(q, k, v)
        y = y.transpose(1, 2).flatten(2)
        if c.output_gate:
            y = y * torch.sigmoid(self.gate_proj(u))
        if c.head_gate:
            y = head_gate(y, self.gate_proj(u), c.n_heads)
        return self.o_proj(y), conv | {"key_cache": k, "value_cache": v}

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        norm = rms_norm_training if torch.is_grad_enabled() else rms_norm
        return norm(q, self.q_norm.weight, self.eps), norm(k, self.k_norm.weight, self.eps)


def _causal_mask(window: int | None, queries: int, keys: int) -> Tensor:
    """Return a mask, bool [T, S]: which of the S keys each of the last T queries sees."""
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return causal if window is None else causal.triu(keys - queries - window + 1)


class AttentionExport(MixerExport[AttentionConfig]):
    """Attention's export. In the graph every head is zero-padded to a multiple of 8 values."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.wide = wide = padded_head_dim(config.head_dim)
        # part of the joined product → number of heads, rows per head
        self.parts = {
            "q_proj": (config.n_heads, wide),
            "k_proj": (config.n_kv_heads, wide),
            "v_proj": (config.n_kv_heads, wide),
        }
        if config.gates:
            self.parts["gate_proj"] = (config.n_heads, wide if config.output_gate else 1)

    @property
    def _rows(self) -> int:
        return sum(map(math.prod, self.parts.values()))

    def module(self, d_model: int, eps: float) -> Attention:
        return Attention(self.config, d_model, eps)

    def matrices(self, d_model: int) -> dict[str, Matrix]:
        out = self.config.n_heads * self.wide
        reads, listed = ("gated", "attended_time") if self.config.gates else ("attended_time", "")
        return {
            "qkv_proj": Matrix(self._rows, self.config.input_width(d_model), "normed"),
            "o_proj": Matrix(d_model, out, reads, reads_listed=listed),
        }

    def plan(self, planner: LayerPlanner) -> LayerPlan:
        return LayerPlan(planner.products(), cache=planner.cache)

    def weight(self, name: str, fetch: Fetch) -> F32:
        module, _, kind = name.partition(".")
        if module == "qkv_proj":
            return np.concatenate(
                [self._padded(fetch(f"{part}.{kind}"), *rows) for part, rows in self.parts.items()]
            )
        if name == "o_proj.weight":
            columns = self._padded(fetch(name).T, self.config.n_heads, self.wide)
            return np.ascontiguousarray(columns.T)
        return fetch(name)

    def _padded(self, weight: F32, heads: int, wide: int) -> F32:
        """Pad [heads·P, …] to [heads·wide, …] with zero rows at the end of each head."""
        split = weight.reshape(heads, -1, *weight.shape[1:])
        extra = [(0, 0)] * split.ndim
        extra[1] = (0, wide - split.shape[1])
        return np.pad(split, extra).reshape(heads * wide, *weight.shape[1:])

    def _unpadded(self, array: Array, start: int, heads: int, wide: int) -> Array:
        """Return the rows of `heads` heads from row `start` on, without the padding."""
        split = array[start : start + heads * wide].reshape(heads, wide, *array.shape[1:])
        own = min(wide, self.config.head_dim)
        return split[:, :own].reshape(heads * own, *array.shape[1:])

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        module, _, kind = name.partition(".")
        if module in self.parts:
            order = list(self.parts)
            first = sum(math.prod(self.parts[before]) for before in order[: order.index(module)])
            rows, joined = self.parts[module], (self._rows, *shape[1:])
            return Stored(f"qkv_proj.{kind}", joined, lambda w: self._unpadded(w, first, *rows))
        if name == "o_proj.weight":
            heads = self.config.n_heads
            whole = (shape[0], heads * self.wide)
            return Stored(name, whole, lambda w: self._unpadded(w.T, 0, heads, self.wide).T)
        if module in _NORMS:
            heads, wide = self.parts[_NORMS[module]]
            own = heads if self.config.qk_whole else 1
            return Stored(
                name,
                (heads * wide,),
                lambda w: self._unpadded(w, 0, own, wide) / self._padding_factor(),
            )
        return super().stored(name, shape)

    def _padding_factor(self) -> np.float32:
        """Return the factor by which padding shrinks the root mean square of a head."""
        return np.float32(math.sqrt(self.config.head_dim / self.wide))

    def _norm_heads(self, at: LayerGraph, value: str, name: str, heads: int) -> str:
        """Norm each head of `value`, or all at once; the padding has no effect on the result."""
        g, whole = at.g, self.config.qk_whole
        own, groups = (heads, 1) if whole else (1, heads)
        weight = g.weight(
            at.named(f"{name}.weight"),
            lambda w: np.tile(self._padded(w * self._padding_factor(), own, self.wide), groups),
        )
        eps = g.config.norm.eps * self.config.head_dim / self.wide
        (normed,) = g.call(
            "GroupRMSNorm", [value, weight], [f"{value}.normed"], eps=eps, groups=groups
        )
        return normed

    def nodes(self, at: LayerGraph, u: ProductInput) -> str:
        g, c, wide = at.g, self.config, self.wide
        heads, kv = c.n_heads, c.n_kv_heads
        qkv = at.linear("qkv_proj", u, "qkv", c.qkv_bias)
        if c.d_conv is not None:
            qkv = convolution(at, c, qkv, bias=True, op="CausalConvPlain")
        if c.gates:
            attention_rows = (heads + 2 * kv) * wide
            qkv, gate = at.split(
                qkv, {"qkv_own": attention_rows, "gate": self._rows - attention_rows}
            )
        qkv = g.node("Transpose", [qkv], at.named("qkv_batch"), perm=[1, 0, 2])
        q, k, v = at.split(qkv, {"q": heads * wide, "k": kv * wide, "v": kv * wide})
        if c.qk_norm:
            q, k = self._norm_heads(at, q, "q_norm", heads), self._norm_heads(at, k, "k_norm", kv)
        if c.rope is not None:
            cos, sin = at.shared.rotations[c.rope]
            dims = {"head_dim": wide, "dim": c.rope.dim}
            q = g.call("Rope", [q, cos, sin], [f"{q}.turned"], heads=heads, **dims)[0]
            k = g.call("Rope", [k, cos, sin], [f"{k}.turned"], heads=kv, **dims)[0]
        cache: list[str | int] = ["B", kv, "capacity", wide]
        half = at.plan.cache == "fp16"
        kind = "f16" if half else "f32"
        caches = [g.input(at.named(f"{w}_cache"), kind, cache) for w in ("key", "value")]
        y, *written = g.call(
            "AttentionF16" if half else "Attention",
            [q, k, v, *caches, "last", "total", at.shared.biases[c.window]],
            [at.named("attended"), at.named("key_cache_out"), at.named("value_cache_out")],
            heads=heads,
            kv_heads=kv,
            head_dim=wide,
            scale=1 / math.sqrt(c.head_dim),
            window=c.window or 0,
            softcap=c.softcap or 0.0,
        )
        for out in written:
            g.output(out, cache, kind)
        y = g.node("Transpose", [y], at.named("attended_time"), perm=[1, 0, 2])
        if c.output_gate:
            (y,) = g.call("SigmoidGate", [y, gate], [at.named("gated")])
        if c.head_gate:
            (y,) = g.call("HeadGate", [y, gate], [at.named("gated")], heads=heads)
        return at.linear("o_proj", y, "out", c.out_bias)


EXPORT = AttentionExport
