"""The four mixers as modules whose parameters carry the canonical names of `edge.tensors`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, Mixer, MlpConfig, NormConfig
from edge.export.network.chunked import selective_scan_heads_chunked
from edge.export.network.conv import causal_conv1d_training
from edge.export.network.norms import gated_rms_norm_training, rms_norm_training
from edge.plugins import reference
from edge.rope import inverse_frequencies

State = dict[str, Tensor]
CHUNK = 32


class Norm(nn.Module):
    """RMSNorm or LayerNorm over d_model."""

    def __init__(self, config: NormConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return reference.layer_norm(x, self.weight, self.bias, self.config.eps)
        norm = rms_norm_training if torch.is_grad_enabled() else reference.rms_norm
        return norm(x, self.weight, self.config.eps)


class Conv1d(nn.Module):
    """Weights of a causal depthwise convolution: weight [C, K], bias [C] or None."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor, conv_state: Tensor) -> tuple[Tensor, Tensor]:
        run = causal_conv1d_training if torch.is_grad_enabled() else reference.causal_conv1d
        return run(x, conv_state, self.weight, self.bias)


def _initial_dt_bias(size: int, low: float = 1e-3, high: float = 1e-1) -> Tensor:
    """Inverse softplus of Δ log-uniform in [low, high] (Mamba, section 3.6)."""
    delta = torch.exp(torch.rand(size) * (math.log(high) - math.log(low)) + math.log(low))
    return delta + torch.log(-torch.expm1(-delta))


class Mamba1(nn.Module):
    def __init__(self, config: Mamba1Config, d_model: int) -> None:
        super().__init__()
        self.config = config
        inner, state, rank = config.d_inner, config.d_state, config.dt_rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=config.proj_bias)
        self.conv1d = Conv1d(inner, config.d_conv, config.conv_bias)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, state + 1)).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, d_model, bias=config.proj_bias)
        with torch.no_grad():
            self.dt_proj.bias.copy_(_initial_dt_bias(inner))

    def forward(self, u: Tensor, state: State, position: int) -> tuple[Tensor, State]:
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x, conv_state = self.conv1d(x, state["conv_state"])
        c = self.config
        dt, B, C = self.x_proj(x).split([c.dt_rank, c.d_state, c.d_state], dim=-1)
        y, ssm_state = reference.selective_scan(
            x, dt @ self.dt_proj.weight.T, self.A_log, B, C, self.D, self.dt_proj.bias, z,
            state["ssm_state"],
        )  # fmt: skip
        return self.out_proj(y), {"conv_state": conv_state, "ssm_state": ssm_state}


class Scale(nn.Module):
    """The learned weight of the gated norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Mamba2(nn.Module):
    def __init__(self, config: Mamba2Config, d_model: int, eps: float) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.in_proj = nn.Linear(d_model, config.in_proj_rows, bias=config.proj_bias)
        self.conv1d = Conv1d(config.conv_channels, config.d_conv, config.conv_bias)
        self.dt_bias = nn.Parameter(_initial_dt_bias(config.n_heads))
        self.A_log = nn.Parameter(torch.log(torch.empty(config.n_heads).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(config.n_heads))
        if config.gated_norm:
            self.gated_norm = Scale(config.d_ssm)
        self.out_proj = nn.Linear(config.d_inner, d_model, bias=config.proj_bias)

    def forward(self, u: Tensor, state: State, position: int) -> tuple[Tensor, State]:
        c = self.config
        sizes = [c.d_mlp, c.d_mlp, c.d_ssm, c.conv_channels, c.n_heads]
        z0, x0, z, xBC, dt = self.in_proj(u).split(sizes, dim=-1)
        xBC, conv_state = self.conv1d(xBC, state["conv_state"])
        x, B, C = xBC.split([c.d_ssm, c.n_groups * c.d_state, c.n_groups * c.d_state], dim=-1)
        args = (
            x.unflatten(-1, (c.n_heads, c.head_dim)), dt, self.A_log,
            B.unflatten(-1, (c.n_groups, c.d_state)), C.unflatten(-1, (c.n_groups, c.d_state)),
            self.D, self.dt_bias, state["ssm_state"], c.dt_limit,
        )  # fmt: skip
        if u.shape[1] < CHUNK:
            y, ssm_state = reference.selective_scan_heads(*args)
        else:
            y, ssm_state = selective_scan_heads_chunked(*args, chunk=CHUNK)
        y = y.flatten(-2)
        if c.gated_norm:
            training = torch.is_grad_enabled()
            norm = gated_rms_norm_training if training else reference.gated_rms_norm
            y = norm(y, z, self.gated_norm.weight, self.eps, c.n_groups)
        else:
            y = y * F.silu(z)
        if c.d_mlp:
            y = torch.cat([F.silu(z0) * x0, y], dim=-1)
        return self.out_proj(y), {"conv_state": conv_state, "ssm_state": ssm_state}


class Attention(nn.Module):
    """State: key_cache and value_cache [B, n_kv_heads, tokens so far, P], keys already rotated."""

    def __init__(self, config: AttentionConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(d_model, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d_model, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d_model, kv, bias=config.qkv_bias)
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
        q, k, v = (
            p(u).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if c.rope is not None:
            positions = torch.arange(position, position + u.shape[1], device=u.device)
            q, k = (reference.rope(m, positions, self._frequencies(u.device)) for m in (q, k))
        k = torch.cat([state["key_cache"].to(k.dtype), k], dim=2)
        v = torch.cat([state["value_cache"].to(v.dtype), v], dim=2)
        if torch.is_grad_enabled() and k.shape[2] == u.shape[1]:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = reference.attention(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2)), {"key_cache": k, "value_cache": v}


class Mlp(nn.Module):
    def __init__(self, config: MlpConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        if config.gated:
            self.gate_proj = nn.Linear(d_model, config.d_intermediate, bias=config.bias)
        self.up_proj = nn.Linear(d_model, config.d_intermediate, bias=config.bias)
        self.down_proj = nn.Linear(config.d_intermediate, d_model, bias=config.bias)

    def forward(self, u: Tensor, state: State, position: int) -> tuple[Tensor, State]:
        up = self.up_proj(u)
        if self.config.gated:
            return self.down_proj(F.silu(self.gate_proj(u)) * up), {}
        tanh = self.config.form == "gelu_tanh"
        return self.down_proj(F.gelu(up, approximate="tanh" if tanh else "none")), {}


def build_mixer(config: Mixer, d_model: int, eps: float) -> nn.Module:
    """The module for one layer's mixer, freshly initialised."""
    if isinstance(config, Mamba1Config):
        return Mamba1(config, d_model)
    if isinstance(config, Mamba2Config):
        return Mamba2(config, d_model, eps)
    if isinstance(config, AttentionConfig):
        return Attention(config, d_model)
    assert isinstance(config, MlpConfig)
    return Mlp(config, d_model)
