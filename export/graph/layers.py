"""The four mixers as nodes. Activations are time-major: [T, B, …]."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, MlpConfig
from edge.export.graph.builder import F32, GraphBuilder


@dataclass
class Shared:
    """Values computed once and used by many layers; the names of graph inputs."""

    taps: dict[int, tuple[str, str]] = field(default_factory=dict)
    rotations: dict[tuple[float, int], tuple[str, str]] = field(default_factory=dict)
    last_only: str = ""
    last: str = ""
    total: str = ""
    bias: str = ""


def _proj_bias(g: GraphBuilder, name: str, present: bool) -> str | None:
    return g.weight(f"{name}.bias") if present else None


def _convolution(
    g: GraphBuilder, layer: Mamba1Config | Mamba2Config, prefix: str, x: str, shared: Shared
) -> str:
    """Causal convolution with SiLU; binds the layer's conv_state and emits its kept rows."""
    rows, channels = layer.d_conv - 1, layer.conv_channels
    state = g.input(f"{prefix}.conv_state", "f32", [rows, "B", channels])
    weight = g.weight(f"{prefix}.conv1d.weight", lambda w: w.T[:, None, :])
    bias = f"{prefix}.conv1d.bias"
    if layer.conv_bias:
        g.weight(bias)
    else:
        g.constant(bias, np.zeros(channels, np.float32))
    taps, kept_taps = shared.taps[layer.d_conv]
    y, states = g.call(
        "CausalConv1d",
        [x, state, taps, kept_taps, weight, bias],
        [f"{prefix}.conv", f"{prefix}.conv_states"],
    )
    g.output(states, ["R", rows, "B", channels])
    return y


def mamba1(g: GraphBuilder, layer: Mamba1Config, prefix: str, u: str, shared: Shared) -> str:
    """Mamba-1 (Mamba, figure 3 and algorithm 2)."""
    inner, n, rank = layer.d_inner, layer.d_state, layer.dt_rank
    bias = _proj_bias(g, f"{prefix}.in_proj", layer.proj_bias)
    xz = g.linear(u, f"{prefix}.in_proj.weight", f"{prefix}.xz", bias=bias)
    split = [f"{prefix}.x", f"{prefix}.z"]
    x, z = g.nodes("Split", [xz, g.integers([inner, inner])], split, axis=-1)
    x = _convolution(g, layer, prefix, x, shared)
    dbc = g.linear(x, f"{prefix}.x_proj.weight", f"{prefix}.dbc")
    split = [f"{prefix}.low_rank_dt", f"{prefix}.B", f"{prefix}.C"]
    low, b, c = g.nodes("Split", [dbc, g.integers([rank, n, n])], split, axis=-1)
    dt = g.linear(low, f"{prefix}.dt_proj.weight", f"{prefix}.dt")
    inputs = [
        x, dt, b, c, z,
        g.weight(f"{prefix}.A_log", lambda a: -np.exp(a.T)),
        g.weight(f"{prefix}.D"),
        g.weight(f"{prefix}.dt_proj.bias"),
        g.input(f"{prefix}.ssm_state", "f32", ["B", n, inner]),
        "kept", "parents", "tree", shared.last_only,
    ]  # fmt: skip
    y, states = g.call("SelectiveScan", inputs, [f"{prefix}.scan", f"{prefix}.ssm_states"])
    g.output(states, ["R", "B", n, inner])
    bias = _proj_bias(g, f"{prefix}.out_proj", layer.proj_bias)
    return g.linear(y, f"{prefix}.out_proj.weight", f"{prefix}.out", bias=bias)


def mamba2(g: GraphBuilder, layer: Mamba2Config, prefix: str, u: str, shared: Shared) -> str:
    """Mamba-2 (Mamba-2, section 7 and figure 6)."""
    bias = _proj_bias(g, f"{prefix}.in_proj", layer.proj_bias)
    projected = g.linear(u, f"{prefix}.in_proj.weight", f"{prefix}.zxbcdt", bias=bias)
    sizes = [layer.d_ssm, layer.conv_channels, layer.n_heads]
    names = [f"{prefix}.z", f"{prefix}.xBC", f"{prefix}.dt"]
    if layer.d_mlp:
        sizes = [layer.d_mlp, layer.d_mlp, *sizes]
        names = [f"{prefix}.z0", f"{prefix}.x0", *names]
    *mlp, z, xbc, dt = g.nodes("Split", [projected, g.integers(sizes)], names, axis=-1)
    xbc = _convolution(g, layer, prefix, xbc, shared)
    shares = layer.n_groups * layer.d_state
    split = [f"{prefix}.x", f"{prefix}.B", f"{prefix}.C"]
    sizes = [layer.d_ssm, shares, shares]
    x, b, c = g.nodes("Split", [xbc, g.integers(sizes)], split, axis=-1)
    y = _scan_heads(g, layer, prefix, (x, dt, b, c))
    if layer.gated_norm:
        y = g.call(
            "GatedRMSNorm",
            [y, z, g.weight(f"{prefix}.gated_norm.weight")],
            [f"{prefix}.gated"],
            eps=g.config.norm.eps,
            groups=layer.n_groups,
        )[0]
    else:
        y = g.call("SiluGate", [y, z], [f"{prefix}.gated"])[0]
    if mlp:
        z0, x0 = mlp
        side = g.call("SiluGate", [x0, z0], [f"{prefix}.side"])[0]
        y = g.node("Concat", [side, y], f"{prefix}.joined", axis=-1)
    bias = _proj_bias(g, f"{prefix}.out_proj", layer.proj_bias)
    return g.linear(y, f"{prefix}.out_proj.weight", f"{prefix}.out", bias=bias)


def _scan_heads(
    g: GraphBuilder, layer: Mamba2Config, prefix: str, xdtbc: tuple[str, str, str, str]
) -> str:
    shape = [layer.n_heads, layer.head_dim, layer.d_state]
    low, high = layer.dt_limit
    y, states = g.call(
        "SelectiveScanHeads",
        [
            *xdtbc,
            g.weight(f"{prefix}.A_log", lambda a: -np.exp(a)),
            g.weight(f"{prefix}.D"),
            g.weight(f"{prefix}.dt_bias"),
            g.input(f"{prefix}.ssm_state", "f32", ["B", *shape]),
            "kept",
            "ancestors",
        ],
        [f"{prefix}.scan", f"{prefix}.ssm_states"],
        heads=layer.n_heads,
        head_dim=layer.head_dim,
        groups=layer.n_groups,
        d_state=layer.d_state,
        dt_min=float(low),
        dt_max=float(high),
    )
    g.output(states, ["R", "B", *shape])
    return y


def padded_head_dim(layer: AttentionConfig) -> int:
    """head_dim rounded up to a multiple of 8, as GroupQueryAttention needs; the rest is zeros."""
    return -(-layer.head_dim // 8) * 8


def _pad_heads(weight: F32, heads: int, padded: int) -> F32:
    """[heads·P, …] → [heads·padded, …] with zero rows at the end of each head."""
    split = weight.reshape(heads, -1, *weight.shape[1:])
    extra = [(0, 0)] * split.ndim
    extra[1] = (0, padded - split.shape[1])
    return np.pad(split, extra).reshape(heads * padded, *weight.shape[1:])


def attention(g: GraphBuilder, layer: AttentionConfig, prefix: str, u: str, shared: Shared) -> str:
    """Grouped-query attention. q, k and v are one product; the caches are written in place."""
    heads, kv, wide = layer.n_heads, layer.n_kv_heads, padded_head_dim(layer)
    parts = (("q_proj", heads), ("k_proj", kv), ("v_proj", kv))

    def joined(what: str) -> F32:
        return np.concatenate(
            [_pad_heads(g.tensor(f"{prefix}.{part}.{what}"), n, wide) for part, n in parts]
        )

    name = f"{prefix}.qkv_proj"
    bias = g.constant(f"{name}.bias", joined("bias")) if layer.qkv_bias else None
    qkv = g.linear(
        u, f"{name}.weight", f"{prefix}.qkv", bias=bias, make=lambda: joined("weight")
    )  # fmt: skip
    qkv = g.node("Transpose", [qkv], f"{prefix}.qkv_batch", perm=[1, 0, 2])
    names = [f"{prefix}.{n}" for n in "qkv"]
    sizes = g.integers([heads * wide, kv * wide, kv * wide])
    q, k, v = g.nodes("Split", [qkv, sizes], names, axis=-1)
    if layer.rope is not None:
        cos, sin = shared.rotations[layer.rope.theta, layer.rope.dim]
        dims = {"head_dim": wide, "dim": layer.rope.dim}
        q = g.call("Rope", [q, cos, sin], [f"{q}.turned"], heads=heads, **dims)[0]
        k = g.call("Rope", [k, cos, sin], [f"{k}.turned"], heads=kv, **dims)[0]
    cache: list[str | int] = ["B", kv, "capacity", wide]
    caches = [g.input(f"{prefix}.{w}_cache", "f32", cache) for w in ("key", "value")]
    y, *written = g.call(
        "Attention",
        [q, k, v, *caches, shared.last, shared.total, shared.bias],
        [f"{prefix}.attended", f"{prefix}.key_cache_out", f"{prefix}.value_cache_out"],
        heads=heads,
        kv_heads=kv,
        head_dim=wide,
        scale=1 / math.sqrt(layer.head_dim),
    )
    for out in written:
        g.output(out, cache)
    y = g.node("Transpose", [y], f"{prefix}.attended_time", perm=[1, 0, 2])
    bias = _proj_bias(g, f"{prefix}.o_proj", layer.out_bias)

    def o_proj() -> F32:
        return np.ascontiguousarray(
            _pad_heads(g.tensor(f"{prefix}.o_proj.weight").T, heads, wide).T
        )

    return g.linear(y, f"{prefix}.o_proj.weight", f"{prefix}.out", bias=bias, make=o_proj)


def mlp(g: GraphBuilder, layer: MlpConfig, prefix: str, u: str, shared: Shared) -> str:
    """down(silu(gate) · up); gate and up are one product."""

    def joined(what: str) -> F32:
        return np.concatenate([g.tensor(f"{prefix}.{p}_proj.{what}") for p in ("gate", "up")])

    name, wide = f"{prefix}.gate_up_proj", layer.d_intermediate
    bias = g.constant(f"{name}.bias", joined("bias")) if layer.bias else None
    both = g.linear(
        u, f"{name}.weight", f"{prefix}.gate_up", bias=bias, make=lambda: joined("weight")
    )  # fmt: skip
    split = [f"{prefix}.gate", f"{prefix}.up"]
    gate, up = g.nodes("Split", [both, g.integers([wide, wide])], split, axis=-1)
    y = g.call("SiluGate", [up, gate], [f"{prefix}.gated"])[0]
    bias = _proj_bias(g, f"{prefix}.down_proj", layer.bias)
    return g.linear(y, f"{prefix}.down_proj.weight", f"{prefix}.out", bias=bias)
