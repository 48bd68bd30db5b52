"""A reference for MambaInLlama's checkpoints: transformers' Llama with a plain mixer in its blocks.

It is written from jxiw/MambaInLlama 60d64dc (mamba/ and mamba2/hybrid_mamba_layer.py), not from our
code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.checkpoints import random_tensor, write_json
from tests.transformers_checkpoints import save_llama

HEADS, KV_HEADS, DIM, WIDE = 4, 2, 8, 32
STATES, RANK = 4, 2  # of Mamba, whose heads are as wide as its state


class PlainMixer(nn.Module):
    """Mamba-2 token by token, one sequence, in fp64; called where Llama calls its attention."""

    def __init__(self, tensors: dict[str, Tensor], eps: float) -> None:
        super().__init__()
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.eps = eps

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.stack([self.one(row) for row in hidden_states]).to(hidden_states.dtype), None

    def one(self, u: Tensor) -> Tensor:
        t, inner, narrow = self.tensors, HEADS * DIM, KV_HEADS * DIM
        sizes = [inner, narrow + narrow + inner, HEADS]
        z, xbc, dt = (u.double() @ t["in_proj.weight"].T).split(sizes, -1)
        before = torch.cat([torch.zeros(3, xbc.shape[1], dtype=xbc.dtype), xbc])
        taps = t["conv1d.weight"][:, 0]
        xbc = F.silu(
            torch.stack([(before[i : i + 4].T * taps).sum(1) for i in range(len(u))])
            + t["conv1d.bias"]
        )
        x, b, c = xbc.split([narrow, narrow, inner], -1)
        group = HEADS // KV_HEADS
        x, b = (m.unflatten(-1, (KV_HEADS, DIM)).repeat_interleave(group, 1) for m in (x, b))
        c = c.unflatten(-1, (HEADS, DIM))
        state, said = torch.zeros(HEADS, DIM, DIM, dtype=xbc.dtype), []
        for now in range(len(u)):
            delta = F.softplus(dt[now] + t["dt_bias"])
            decay = torch.exp(-delta * torch.exp(t["A_log"]))
            new = delta[:, None, None] * x[now][:, :, None] * b[now][:, None, :]
            state = decay[:, None, None] * state + new
            said.append((state * c[now][:, None, :]).sum(-1) + t["D"][:, None] * x[now])
        y = torch.stack(said) * F.silu(z).unflatten(-1, (HEADS, DIM))
        y = y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (y.flatten(-2) * t["norm.weight"]) @ t["out_proj.weight"].T


class PlainMamba(PlainMixer):
    """The same for Mamba, channel by channel."""

    def one(self, u: Tensor) -> Tensor:
        t, u = self.tensors, u.double()
        x, z, b, c = (
            u @ t[f"{name}.weight"].T for name in ("in_proj_x", "in_proj_z", "B_proj", "C_proj")
        )
        repeats = HEADS // KV_HEADS
        x, b = (
            m.unflatten(-1, (-1, STATES)).repeat_interleave(repeats, 1).flatten(1) for m in (x, b)
        )
        before = torch.cat([torch.zeros(3, x.shape[1], dtype=x.dtype), x])
        taps = t["conv1d.weight"][:, 0]
        x = F.silu(
            torch.stack([(before[i : i + 4].T * taps).sum(1) for i in range(len(u))])
            + t["conv1d.bias"]
        )
        # dt_proj is a layer with a bias, and the scan gets the bias too
        dt = u @ t["dt_proj_down.weight"].T @ t["dt_proj.weight"].T + t["dt_proj.bias"]
        delta = F.softplus(dt + t["dt_proj.bias"])
        said = torch.empty_like(x)
        for channel in range(x.shape[1]):
            head = slice(channel // STATES * STATES, channel // STATES * STATES + STATES)
            state = torch.zeros(STATES, dtype=x.dtype)
            for now in range(len(u)):
                step = delta[now, channel]
                decay = torch.exp(-step * torch.exp(t["A_log"][channel]))
                state = decay * state + step * x[now, channel] * b[now, head]
                said[now, channel] = state @ c[now, head] + t["D"][channel] * x[now, channel]
        return (said * F.silu(z)) @ t["out_proj.weight"].T


def _mamba_shapes() -> dict[str, tuple[int, ...]]:
    inner, narrow = HEADS * DIM, KV_HEADS * DIM
    return {
        "in_proj_x.weight": (narrow, WIDE), "in_proj_z.weight": (inner, WIDE),
        "B_proj.weight": (narrow, WIDE), "C_proj.weight": (inner, WIDE),
        "dt_proj_down.weight": (RANK, WIDE), "dt_proj.weight": (inner, RANK),
        "dt_proj.bias": (inner,), "conv1d.weight": (inner, 1, 4), "conv1d.bias": (inner,),
        "A_log": (inner, STATES), "D": (inner,), "out_proj.weight": (WIDE, inner),
    }  # fmt: skip


def save_mamba_in_llama(
    path: Path, attention: tuple[int, ...] = (1,), *, mamba2: bool = True, **overrides: Any
) -> Path:
    """Write `save_llama`'s checkpoint with random SSMs in the blocks not in `attention`."""
    save_llama(path, **overrides)
    config = json.loads((path / "config.json").read_text())
    blocks = config["num_hidden_layers"]
    tensors = load_file(path / "model.safetensors")
    inner, narrow = HEADS * DIM, KV_HEADS * DIM
    shapes = {
        "in_proj.weight": (2 * inner + 2 * narrow + HEADS, WIDE),
        "conv1d.weight": (inner + 2 * narrow, 1, 4),
        "conv1d.bias": (inner + 2 * narrow,),
        "dt_bias": (HEADS,), "A_log": (HEADS,), "D": (HEADS,),
        "norm.weight": (inner,), "out_proj.weight": (WIDE, inner),
    }  # fmt: skip
    ssm: dict[str, Any] = {"expand": 1, "ngroups": HEADS, "d_state": DIM}
    if not mamba2:
        shapes, ssm = _mamba_shapes(), {"expand": 1, "d_state": STATES}
    generator = torch.Generator().manual_seed(7)
    for block in set(range(blocks)) - set(attention):
        prefix = f"model.layers.{block}"
        for name in [name for name in tensors if name.startswith(f"{prefix}.self_attn.")]:
            del tensors[name]
        for name, shape in shapes.items():
            full = f"{prefix}.mamba.{name}"
            tensors[full] = random_tensor(full, shape, generator)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_json(path / "mamba_config.json", {
        "d_model": WIDE, "ssm_cfg": ssm,
        "rms_norm_eps": config["rms_norm_eps"], "vocab_size": None, "d_inner": inner,
        "d_xb": narrow, "intermediate_size": config["intermediate_size"], "hidden_act": "silu",
        "n_layer": blocks, "attn_layers": sorted(attention),
    })  # fmt: skip
    return path


def judge(path: Path) -> Any:
    """Open the model of such a folder; transformers runs everything but its mixers."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = load_file(path / "model.safetensors")
    for block, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{block}.mamba."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        if own:
            plain = PlainMamba if "B_proj.weight" in own else PlainMixer
            layer.self_attn = plain(own, model.config.rms_norm_eps)
    return model
