"""state-spaces and MambaByte checkpoints against a reference, since no installed package runs them.

`Plain` is a second implementation, in float64 and token by token, written from the papers and from
mamba_ssm's published source; it reads the stored tensors by their stored names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from edge.errors import CheckpointError
from edge.export.checkpoint import open_checkpoint
from edge.export.network import Network
from tests.state_spaces_checkpoints import save_codestral, save_mambabyte, save_state_spaces
from tests.transformers_checkpoints import save_mamba, save_mamba2

TOKENS = torch.randint(256, (1, 70), generator=torch.Generator().manual_seed(2))


def run_network(path: Path, runs: tuple[int, ...] = (70,)) -> Tensor:
    checkpoint = open_checkpoint(path)
    network = Network(checkpoint.config).eval()
    network.load_canonical(dict(checkpoint.tensors()))
    logits, state = [], None
    with torch.no_grad():
        for tokens in torch.split(TOKENS, list(runs), dim=1):
            out, state = network(tokens, state)
            logits.append(out)
    return torch.cat(logits, 1)[0]


class Plain:
    """MambaLMHeadModel (or MambaByteLM) without a cache, position by position."""

    def __init__(self, path: Path, root: str = "backbone") -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        [file] = [*path.glob("*.bin"), *path.glob("*.pt")]
        stored = torch.load(file, weights_only=True)
        self.w: dict[str, Tensor] = {name: tensor.double() for name, tensor in stored.items()}
        self.zero = torch.zeros(1, dtype=torch.float64)
        self.root = root
        names = (
            ("token_embedding", "final_norm") if root == "mambabyte" else ("embedding", "norm_f")
        )
        self.embedding, self.final = (f"{root}.{name}" for name in names)

    def logits(self) -> Tensor:
        x = self.w[f"{self.embedding}.weight"][TOKENS[0]]
        for n in range(self.config["n_layer" if "n_layer" in self.config else "num_layers"]):
            block = f"{self.root}.layers.{n}"
            x = x + self.mix(n, f"{block}.mixer", self.norm(x, f"{block}.norm"))
            if f"{block}.mlp.fc1.weight" in self.w:
                both = self.norm(x, f"{block}.norm2") @ self.w[f"{block}.mlp.fc1.weight"].T
                up, gate = both.chunk(2, -1)
                x = x + (up * F.silu(gate)) @ self.w[f"{block}.mlp.fc2.weight"].T
        return self.norm(x, self.final) @ self.w["lm_head.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.bias" in self.w:
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[f"{name}.weight"]
        return x + self.w.get(f"{name}.bias", self.zero)

    def mix(self, n: int, name: str, u: Tensor) -> Tensor:
        if n in self.config.get("attn_layer_idx", []):
            return self.attention(name, u)
        ssm = self.config.get("ssm_cfg", {})
        if ssm.get("layer") == "Mamba2":
            return self.mamba2(ssm, name, u)
        return self.mamba1(name, u)

    def convolve(self, name: str, x: Tensor, silu: bool = True) -> Tensor:
        weight = self.w[f"{name}.conv1d.weight"][:, 0]
        rows = []
        for t in range(len(x)):
            total = self.w[f"{name}.conv1d.bias"].clone()
            for back in range(weight.shape[1]):
                if t - back >= 0:
                    total = total + weight[:, -1 - back] * x[t - back]
            rows.append(total * torch.sigmoid(total) if silu else total)
        return torch.stack(rows)

    def mamba1(self, name: str, u: Tensor) -> Tensor:
        x, z = (u @ self.w[f"{name}.in_proj.weight"].T).chunk(2, -1)
        x = self.convolve(name, x)
        A = -self.w[f"{name}.A_log"].exp()
        states, rank = A.shape[1], self.w[f"{name}.dt_proj.weight"].shape[1]
        h, ys = torch.zeros_like(A), []
        for t in range(len(x)):
            projected = self.w[f"{name}.x_proj.weight"] @ x[t]
            dt, B, C = torch.split(projected, [rank, states, states])
            raw = self.w[f"{name}.dt_proj.weight"] @ dt + self.w[f"{name}.dt_proj.bias"]
            delta = (1 + raw.exp()).log()
            for e in range(len(delta)):
                h[e] = (delta[e] * A[e]).exp() * h[e] + delta[e] * B * x[t, e]
            ys.append((h @ C + self.w[f"{name}.D"] * x[t]) * F.silu(z[t]))
        return torch.stack(ys) @ self.w[f"{name}.out_proj.weight"].T

    def mamba2(self, ssm: dict[str, Any], name: str, u: Tensor) -> Tensor:
        inner = ssm.get("expand", 2) * u.shape[1]
        d_ssm, P, N = ssm.get("d_ssm", inner), ssm["headdim"], ssm["d_state"]
        H, G, mlp = d_ssm // P, ssm.get("ngroups", 1), inner - d_ssm
        sizes = [mlp, mlp, d_ssm, d_ssm + 2 * G * N, H]
        z0, x0, z, xBC, dt = torch.split(u @ self.w[f"{name}.in_proj.weight"].T, sizes, -1)
        xBC = self.convolve(name, xBC)
        low, high = ssm.get("dt_limit", (0.0, float("inf")))
        h, ys = torch.zeros(H, P, N, dtype=torch.float64), torch.zeros_like(z)
        for t in range(len(u)):
            x, B, C = xBC[t, :d_ssm], xBC[t, d_ssm : d_ssm + G * N], xBC[t, d_ssm + G * N :]
            for i in range(H):
                group = slice(i // (H // G) * N, (i // (H // G) + 1) * N)
                head = slice(i * P, (i + 1) * P)
                delta = (1 + (dt[t, i] + self.w[f"{name}.dt_bias"][i]).exp()).log()
                delta = delta.clamp(low, high)
                decay = (-delta * self.w[f"{name}.A_log"][i].exp()).exp()
                h[i] = decay * h[i] + delta * torch.outer(x[head], B[group])
                ys[t, head] = h[i] @ C[group] + self.w[f"{name}.D"][i] * x[head]
        y = ys * F.silu(z)
        if ssm.get("rmsnorm", True):
            for g in range(G):
                part = slice(g * d_ssm // G, (g + 1) * d_ssm // G)
                y[:, part] /= (y[:, part].pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            y = y * self.w[f"{name}.norm.weight"]
        return torch.cat([F.silu(z0) * x0, y], -1) @ self.w[f"{name}.out_proj.weight"].T

    def attention(self, name: str, u: Tensor) -> Tensor:
        attn = self.config["attn_cfg"]
        heads = attn["num_heads"]
        kv, P = attn.get("num_heads_kv", heads), attn.get("head_dim", u.shape[1] // heads)
        bias = self.w.get(f"{name}.in_proj.bias", self.zero)
        fused = u @ self.w[f"{name}.in_proj.weight"].T + bias
        if attn.get("d_conv"):
            fused = self.convolve(name, fused, silu=False)
        rows = torch.split(fused, [heads * P, kv * P, kv * P], -1)
        q, k, v = (m.reshape(len(u), -1, P) for m in rows)
        q, k = self.rotate(q, attn), self.rotate(k, attn)
        out = torch.zeros_like(q)
        for t in range(len(u)):
            for i in range(heads):
                j = i // (heads // kv)
                scores = (k[: t + 1, j] @ q[t, i]) / P**0.5
                out[t, i] = scores.softmax(0) @ v[: t + 1, j]
        y = out.flatten(1) @ self.w[f"{name}.out_proj.weight"].T
        return y + self.w.get(f"{name}.out_proj.bias", self.zero)

    @staticmethod
    def rotate(x: Tensor, attn: dict[str, Any]) -> Tensor:
        """Rotate each pair (j, j + dim/2) as a complex number, by position · base^(-2j/dim)."""
        half = attn.get("rotary_emb_dim", 0) // 2
        if not half:
            return x
        j = torch.arange(half, dtype=torch.float64)
        angle = torch.arange(len(x))[:, None] * attn.get("rotary_emb_base", 1e4) ** (-j / half)
        turned = torch.complex(x[..., :half], x[..., half : 2 * half])
        turned = turned * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


ATTENTION = {"num_heads": 4, "num_heads_kv": 2, "causal": True, "rotary_emb_dim": 4}
CASES: dict[str, dict[str, Any]] = {
    "mamba": {},
    "mamba-layernorm": {"rms_norm": False},
    "mamba-mlp": {"d_intermediate": 100, "rms_norm": False},
    "mamba-attention": {"attn_layer_idx": [1], "attn_cfg": ATTENTION, "d_intermediate": 130},
    "mamba-untied": {"tie_embeddings": False, "ssm_cfg": {"dt_rank": 3, "expand": 1, "d_conv": 2}},
    "mamba2": {"version": 2},
    "mamba2-groups": {"version": 2, "ssm_cfg": {"ngroups": 4}},
    "mamba2-part-mlp": {"version": 2, "ssm_cfg": {"d_ssm": 32, "ngroups": 2}},
    "mamba2-no-gated-norm": {"version": 2, "ssm_cfg": {"rmsnorm": False, "d_ssm": 48}},
    "mamba2-limited": {"version": 2, "ssm_cfg": {"dt_limit": [0.1, 0.5]}},
    "mamba2-convolved-attention": {
        "version": 2, "attn_layer_idx": [1],
        "attn_cfg": {**ATTENTION, "d_conv": 4, "qkv_proj_bias": False, "out_proj_bias": False},
    },
    "mamba2-attention": {
        "version": 2, "attn_layer_idx": [0], "n_layer": 3,
        "attn_cfg": {"num_heads": 2, "head_dim": 10, "causal": True, "qkv_proj_bias": False,
                     "out_proj_bias": False, "rotary_emb_dim": 6, "rotary_emb_base": 300.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_state_spaces_checkpoint_equals_the_plain_implementation(
    case: str, tmp_path: Path
) -> None:
    path = save_state_spaces(tmp_path, **CASES[case])
    expected = Plain(path).logits()
    for runs in ((70,), (1, 66, 3)):
        torch.testing.assert_close(run_network(path, runs).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["rmsnorm", "layernorm"])
def test_a_mambabyte_checkpoint_equals_the_plain_implementation(
    layout: str, tmp_path: Path
) -> None:
    path = save_mambabyte(tmp_path, layout)
    expected = Plain(path, "backbone" if layout == "rmsnorm" else "mambabyte").logits()
    torch.testing.assert_close(run_network(path).double(), expected, atol=1e-4, rtol=0)


def test_mambabyte_with_layernorm_in_the_state_spaces_layout(tmp_path: Path) -> None:
    path = save_mambabyte(tmp_path, "rmsnorm", rms_norm=False)
    assert open_checkpoint(path).config.norm.kind == "layernorm"
    torch.testing.assert_close(run_network(path).double(), Plain(path).logits(), atol=1e-4, rtol=0)


def test_codestral_mamba_in_the_layout_of_mistral_inference(tmp_path: Path) -> None:
    theirs = save_codestral(tmp_path / "theirs")
    ours = tmp_path / "theirs-ours"
    params = json.loads((theirs / "params.json").read_text())
    one, other = open_checkpoint(ours), open_checkpoint(theirs)
    assert one.config == other.config and other.family == "mistral_mamba"
    for (name, a), (same, b) in zip(one.tensors(), other.tensors(), strict=True):
        assert name == same and torch.equal(a, b)
    assert other.fingerprint() != one.fingerprint()
    (theirs / "params.json").write_text(json.dumps(params | {"dim": "128", "n_groups": 0}))
    with pytest.raises(CheckpointError, match=r"n_groups: is 0") as refused:
        open_checkpoint(theirs)
    assert refused.value.file == str(theirs / "params.json") and refused.value.field == "dim"


@pytest.mark.parametrize("version", [1, 2])
def test_the_same_weights_in_both_formats_are_the_same_model(version: int, tmp_path: Path) -> None:
    theirs = tmp_path / "transformers"
    if version == 1:
        save_mamba(theirs)
        ours = save_state_spaces(tmp_path / "original", 1, like=theirs)
    else:
        save_mamba2(theirs, tie_word_embeddings=True)
        ours = save_state_spaces(tmp_path / "original", 2, like=theirs, ssm_cfg={"ngroups": 2})
    one, other = open_checkpoint(theirs), open_checkpoint(ours)
    assert one.config == other.config
    for (name, a), (same, b) in zip(one.tensors(), other.tensors(), strict=True):
        assert name == same and torch.equal(a, b)
    assert torch.equal(run_network(theirs), run_network(ours))
