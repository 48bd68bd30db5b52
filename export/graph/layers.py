"""The four mixers as nodes of floating ops. Activations are time-major: [T, B, …].

Products round their inputs as the layer's plan says. A Mamba layer whose scan is planned but not
fused runs here too, on values that were rounded and brought back.
"""

from __future__ import annotations

import math

import numpy as np

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, MlpConfig
from edge.export.graph.builder import F32
from edge.export.graph.constants import constant, conv_parts
from edge.export.graph.place import Place
from edge.export.graph.products import Input
from edge.tensors import padded_head_dim


def _convolution(at: Place, layer: Mamba1Config | Mamba2Config, x: str) -> str:
    """Causal convolution with SiLU; binds the layer's conv_state and emits its kept rows."""
    g, rows, channels = at.g, layer.d_conv - 1, layer.conv_channels
    state = g.input(at.named("conv_state"), "f32", [rows, "B", channels])
    parts = conv_parts(layer)
    weight = constant(at, "conv1d.weight", lambda w: w.T[:, None, :], parts)
    bias = at.named("conv1d.bias")
    if layer.conv_bias:
        constant(at, "conv1d.bias", None, parts)
    else:
        g.constant(bias, np.zeros(channels, np.float32))
    taps, kept_taps = at.shared.taps[layer.d_conv]
    y, states = g.call(
        "CausalConv1d",
        [x, state, taps, kept_taps, weight, bias],
        [at.named("conv"), at.named("conv_states")],
    )
    g.output(states, ["R", rows, "B", channels])
    return y


def mamba1(at: Place, layer: Mamba1Config, u: Input) -> str:
    """Mamba-1 (Mamba, figure 3 and algorithm 2)."""
    g, inner, n, rank = at.g, layer.d_inner, layer.d_state, layer.dt_rank
    xz = at.linear("in_proj", u, "xz", at.bias("in_proj", layer.proj_bias))
    x, z = at.split(xz, {"x": inner, "z": inner})
    x, z = at.site("conv_in", x, inner), at.site("z", z, inner)
    conv = _convolution(at, layer, x)
    x = at.site("x", conv, inner)
    dbc = at.linear("x_proj", at.read(conv, "x_proj", inner), "dbc")
    low, b, c = at.split(dbc, {"low_rank_dt": rank, "B": n, "C": n})
    b, c = at.site("B", b, n), at.site("C", c, n)
    dt = at.linear("dt_proj", at.read(low, "dt_proj", rank), "dt")
    inputs = [
        x, at.site("dt", dt, inner), b, c, z,
        constant(at, "A_log", np.transpose, after=lambda a: -np.exp(a)),
        constant(at, "D"),
        constant(at, "dt_proj.bias"),
        g.input(at.named("ssm_state"), "f32", ["B", n, inner]),
        "kept", "parents", "tree", "last_only",
    ]  # fmt: skip
    y, states = g.call("SelectiveScan", inputs, [at.named("scan"), at.named("ssm_states")])
    g.output(states, ["R", "B", n, inner])
    bias = at.bias("out_proj", layer.proj_bias)
    return at.linear("out_proj", at.read(y, "out_proj", inner), "out", bias)


def mamba2(at: Place, layer: Mamba2Config, u: Input) -> str:
    """Mamba-2 (Mamba-2, section 7 and figure 6)."""
    g, wide, shares = at.g, layer.d_ssm, layer.n_groups * layer.d_state
    projected = at.linear("in_proj", u, "zxbcdt", at.bias("in_proj", layer.proj_bias))
    parts = {"z": wide, "xBC": layer.conv_channels, "dt": layer.n_heads}
    if layer.d_mlp:
        parts = {"z0": layer.d_mlp, "x0": layer.d_mlp, **parts}
    *mlp, z, xbc, dt = at.split(projected, parts)
    z, dt = at.site("z", z, wide), at.site("dt", dt, layer.n_heads)
    xbc = _convolution(at, layer, at.site("conv_in", xbc, layer.conv_channels))
    x, b, c = at.split(xbc, {"x": wide, "B": shares, "C": shares})
    x, b, c = at.site("x", x, wide), at.site("B", b, shares), at.site("C", c, shares)
    y = _scan_heads(at, layer, [x, dt, b, c])
    if layer.gated_norm:
        y = g.call(
            "GatedRMSNorm",
            [y, z, g.weight(at.named("gated_norm.weight"))],
            [at.named("gated")],
            eps=g.config.norm.eps,
            groups=layer.n_groups,
        )[0]
    else:
        y = g.call("SiluGate", [y, z], [at.named("gated")])[0]
    if mlp:
        z0, x0 = mlp
        side = g.call("SiluGate", [x0, z0], [at.named("side")])[0]
        y = g.node("Concat", [side, y], at.named("joined"), axis=-1)
    bias = at.bias("out_proj", layer.proj_bias)
    return at.linear("out_proj", at.read(y, "out_proj", layer.d_inner), "out", bias)


def _scan_heads(at: Place, layer: Mamba2Config, xdtbc: list[str]) -> str:
    g, shape = at.g, [layer.n_heads, layer.head_dim, layer.d_state]
    widths = {"x": layer.d_ssm, "dt": layer.n_heads, "B": layer.n_groups * layer.d_state}
    logged = zip(xdtbc, widths.values(), strict=False)
    y, states = g.call(
        "SelectiveScanHeads",
        [
            *xdtbc,
            constant(at, "A_log", after=lambda a: -np.exp(a)),
            constant(at, "D"),
            constant(at, "dt_bias"),
            g.input(at.named("ssm_state"), "f32", ["B", *shape]),
            "stored",
            "paths",
            *(g.log(value, width, "f32") for value, width in logged),
        ],
        [at.named("scan"), at.named("ssm_states")],
        **head_attributes(layer),
    )
    g.output(states, ["S", "B", *shape])
    return y


def head_attributes(layer: Mamba2Config) -> dict[str, float]:
    """Attributes of `SelectiveScanHeads` and its int8 form."""
    low, high = layer.dt_limit
    return {
        "heads": layer.n_heads,
        "head_dim": layer.head_dim,
        "groups": layer.n_groups,
        "d_state": layer.d_state,
        "dt_min": float(low),
        "dt_max": float(high),
    }


def _pad_heads(weight: F32, heads: int, padded: int) -> F32:
    """[heads·P, …] → [heads·padded, …] with zero rows at the end of each head."""
    split = weight.reshape(heads, -1, *weight.shape[1:])
    extra = [(0, 0)] * split.ndim
    extra[1] = (0, padded - split.shape[1])
    return np.pad(split, extra).reshape(heads * padded, *weight.shape[1:])


def attention(at: Place, layer: AttentionConfig, u: Input) -> str:
    """Grouped-query attention. q, k and v are one product; the caches are written in place."""
    g, shared = at.g, at.shared
    heads, kv, wide = layer.n_heads, layer.n_kv_heads, padded_head_dim(layer.head_dim)
    parts = (("q_proj", heads), ("k_proj", kv), ("v_proj", kv))

    def joined(what: str) -> F32:
        return np.concatenate(
            [_pad_heads(g.tensor(at.named(f"{part}.{what}")), n, wide) for part, n in parts]
        )

    bias = g.constant(at.named("qkv_proj.bias"), joined("bias")) if layer.qkv_bias else None
    qkv = at.linear("qkv_proj", u, "qkv", bias, lambda: joined("weight"))
    qkv = g.node("Transpose", [qkv], at.named("qkv_batch"), perm=[1, 0, 2])
    q, k, v = at.split(qkv, {"q": heads * wide, "k": kv * wide, "v": kv * wide})
    if layer.rope is not None:
        cos, sin = shared.rotations[layer.rope]
        dims = {"head_dim": wide, "dim": layer.rope.dim}
        q = g.call("Rope", [q, cos, sin], [f"{q}.turned"], heads=heads, **dims)[0]
        k = g.call("Rope", [k, cos, sin], [f"{k}.turned"], heads=kv, **dims)[0]
    cache: list[str | int] = ["B", kv, "capacity", wide]
    caches = [g.input(at.named(f"{w}_cache"), "f32", cache) for w in ("key", "value")]
    y, *written = g.call(
        "Attention",
        [q, k, v, *caches, "last", "total", shared.bias],
        [at.named("attended"), at.named("key_cache_out"), at.named("value_cache_out")],
        heads=heads,
        kv_heads=kv,
        head_dim=wide,
        scale=1 / math.sqrt(layer.head_dim),
    )
    for out in written:
        g.output(out, cache)
    y = g.node("Transpose", [y], at.named("attended_time"), perm=[1, 0, 2])

    def o_proj() -> F32:
        return np.ascontiguousarray(
            _pad_heads(g.tensor(at.named("o_proj.weight")).T, heads, wide).T
        )

    bias = at.bias("o_proj", layer.out_bias)
    return at.linear("o_proj", at.read(y, "o_proj", heads * wide), "out", bias, o_proj)


def mlp(at: Place, layer: MlpConfig, u: Input) -> str:
    """down(silu(gate) · up), gate and up being one product; or down(gelu(up))."""
    if not layer.gated:
        return _plain_mlp(at, layer, u)
    g, wide = at.g, layer.d_intermediate

    def joined(what: str) -> F32:
        return np.concatenate([g.tensor(at.named(f"{p}_proj.{what}")) for p in ("gate", "up")])

    bias = g.constant(at.named("gate_up_proj.bias"), joined("bias")) if layer.bias else None
    both = at.linear("gate_up_proj", u, "gate_up", bias, lambda: joined("weight"))
    gate, up = at.split(both, {"gate": wide, "up": wide})
    y = g.call("SiluGate", [up, gate], [at.named("gated")])[0]
    bias = at.bias("down_proj", layer.bias)
    return at.linear("down_proj", at.read(y, "down_proj", wide), "out", bias)


def _plain_mlp(at: Place, layer: MlpConfig, u: Input) -> str:
    up = at.linear("up_proj", u, "up", at.bias("up_proj", layer.bias))
    op = "GeluTanh" if layer.form == "gelu_tanh" else "Gelu"
    y = at.g.call(op, [up], [at.named("activated")])[0]
    bias = at.bias("down_proj", layer.bias)
    return at.linear("down_proj", at.read(y, "down_proj", layer.d_intermediate), "out", bias)
