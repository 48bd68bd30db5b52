"""Tiny random checkpoints as state-spaces and MambaByte store them, written from their sources."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import TOKENS, random_tensor, save_tokenizer, write_json


def save_state_spaces(
    path: Path,
    version: int = 1,
    *,
    like: Path | None = None,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write state-spaces' `MambaLMHeadModel`: config.json and pytorch_model.bin, tied.

    `like` takes the weights of a transformers Mamba or Mamba-2 directory, under the original names;
    the overrides must then describe the same model.
    """
    ssm = {"d_state": 5} if version == 1 else {"layer": "Mamba2", "headdim": 8, "d_state": 6}
    config: dict[str, Any] = dict(
        d_model=24 if version == 1 else 32, n_layer=2, vocab_size=TOKENS, ssm_cfg=ssm,
        rms_norm=True, residual_in_fp32=True, fused_add_norm=True, pad_vocab_size_multiple=8,
    )  # fmt: skip
    config |= overrides
    config["ssm_cfg"] = ssm | (overrides.get("ssm_cfg") or {})
    if like is None:
        tensors = _random_tensors(_state_spaces_shapes(config))
    else:
        stored = load_file(like / "model.safetensors")
        tensors = {n.replace(".embeddings.", ".embedding."): t for n, t in stored.items()}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if config.get("tie_embeddings", True):
        tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    torch.save(tensors, path / "pytorch_model.bin")
    return save_tokenizer(path) if tokenizer else path


def save_codestral(path: Path) -> Path:
    """Write Mamba-2 in the layout of mistral-inference: params.json, of the published sizes."""
    ours = save_state_spaces(
        path.with_name(f"{path.name}-ours"), 2, d_model=128, tie_embeddings=False,
        ssm_cfg={"headdim": 64, "d_state": 128, "ngroups": 2},
    )  # fmt: skip
    path.mkdir()
    params = {
        "dim": 128, "n_layers": 2, "vocab_size": 272, "n_groups": 2, "rms_norm": True,
        "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 1,
        "tie_embeddings": False, "model_type": "mamba",
    }  # fmt: skip
    write_json(path / "params.json", params)
    stored = torch.load(ours / "pytorch_model.bin", weights_only=True)
    save_file({f"model.{n}": t for n, t in stored.items()}, path / "consolidated.safetensors")
    return save_tokenizer(path)


def save_mambabyte(path: Path, layout: str = "rmsnorm", **overrides: Any) -> Path:
    """Write MambaByte: `rmsnorm` as on the Hub, `layernorm` as in the paper's own class."""
    if layout == "rmsnorm":
        values = dict(vocab_size=256, d_model=24) | overrides
        return save_state_spaces(path, 1, tokenizer=False, **values)
    config: dict[str, Any] = dict(
        model_type="mambabyte", d_model=24, num_layers=2, d_state=5, d_conv=4, expand=2
    )
    config |= overrides
    shapes = _mamba1_shapes(
        "mambabyte", config["num_layers"], config["d_model"],
        {k: config[k] for k in ("d_state", "d_conv", "expand")}, bias=True,
    )  # fmt: skip
    width = config["d_model"]
    shapes |= {
        "mambabyte.token_embedding.weight": (256, width),
        "mambabyte.final_norm.weight": (width,),
        "mambabyte.final_norm.bias": (width,),
        "lm_head.weight": (256, width),
    }
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    torch.save(_random_tensors(shapes), path / "mambabyte.pt")
    return path


Shapes = dict[str, tuple[int, ...]]


def _random_tensors(shapes: Shapes) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: random_tensor(name, shape, generator) for name, shape in sorted(shapes.items())}


def _state_spaces_shapes(config: dict[str, Any]) -> Shapes:
    """Return the shapes of MambaLMHeadModel(config).state_dict(), written from its source, not from
    ours.
    """
    width, count, ssm = config["d_model"], config["n_layer"], config["ssm_cfg"]
    attention, bias = config.get("attn_layer_idx", []), not config["rms_norm"]
    build = _mamba2_shapes if ssm.get("layer") == "Mamba2" else _mamba1_shapes
    shapes = build("backbone", count, width, ssm, bias=bias)
    for n in attention:
        mixer = f"backbone.layers.{n}.mixer."
        shapes = {k: v for k, v in shapes.items() if not k.startswith(mixer)}
        shapes |= _mha_shapes(mixer, width, config["attn_cfg"])
    vocabulary = -(-config["vocab_size"] // config["pad_vocab_size_multiple"])
    rows = vocabulary * config["pad_vocab_size_multiple"]
    shapes |= {"backbone.embedding.weight": (rows, width), "backbone.norm_f.weight": (width,)}
    if bias:
        shapes["backbone.norm_f.bias"] = (width,)
    if not config.get("tie_embeddings", True):
        shapes["lm_head.weight"] = (rows, width)
    if config.get("d_intermediate"):
        hidden = -(-config["d_intermediate"] // 128) * 128
        for n in range(count):
            block = f"backbone.layers.{n}."
            shapes |= {
                f"{block}norm2.weight": (width,),
                f"{block}mlp.fc1.weight": (2 * hidden, width),
                f"{block}mlp.fc2.weight": (width, hidden),
            }
            if bias:
                shapes[f"{block}norm2.bias"] = (width,)
    return shapes


def _norms(prefix: str, count: int, width: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{prefix}.layers.{n}.norm.weight": (width,) for n in range(count)}
    if bias:
        shapes |= {f"{prefix}.layers.{n}.norm.bias": (width,) for n in range(count)}
    return shapes


def _mamba1_shapes(prefix: str, count: int, width: int, ssm: dict[str, Any], bias: bool) -> Shapes:
    inner, state = int(ssm.get("expand", 2) * width), ssm["d_state"]
    rank = ssm.get("dt_rank", math.ceil(width / 16))
    shapes = _norms(prefix, count, width, bias)
    for n in range(count):
        mixer = f"{prefix}.layers.{n}.mixer."
        shapes |= {
            f"{mixer}in_proj.weight": (2 * inner, width),
            f"{mixer}conv1d.weight": (inner, 1, ssm.get("d_conv", 4)),
            f"{mixer}conv1d.bias": (inner,),
            f"{mixer}x_proj.weight": (rank + 2 * state, inner),
            f"{mixer}dt_proj.weight": (inner, rank),
            f"{mixer}dt_proj.bias": (inner,),
            f"{mixer}A_log": (inner, state),
            f"{mixer}D": (inner,),
            f"{mixer}out_proj.weight": (width, inner),
        }
    return shapes


def _mamba2_shapes(prefix: str, count: int, width: int, ssm: dict[str, Any], bias: bool) -> Shapes:
    inner = int(ssm.get("expand", 2) * width)
    d_ssm = ssm.get("d_ssm", inner)
    heads, groups = d_ssm // ssm["headdim"], 2 * ssm.get("ngroups", 1) * ssm["d_state"]
    shapes = _norms(prefix, count, width, bias)
    for n in range(count):
        mixer = f"{prefix}.layers.{n}.mixer."
        shapes |= {
            f"{mixer}in_proj.weight": (2 * inner + groups + heads, width),
            f"{mixer}conv1d.weight": (d_ssm + groups, 1, ssm.get("d_conv", 4)),
            f"{mixer}conv1d.bias": (d_ssm + groups,),
            f"{mixer}dt_bias": (heads,),
            f"{mixer}A_log": (heads,),
            f"{mixer}D": (heads,),
            f"{mixer}out_proj.weight": (width, inner),
        }
        if ssm.get("rmsnorm", True):
            shapes[f"{mixer}norm.weight"] = (d_ssm,)
    return shapes


def _mha_shapes(mixer: str, width: int, attn: dict[str, Any]) -> Shapes:
    heads = attn["num_heads"]
    size = attn.get("head_dim", width // heads)
    rows = size * (heads + 2 * attn.get("num_heads_kv", heads))
    shapes: Shapes = {
        f"{mixer}in_proj.weight": (rows, width),
        f"{mixer}out_proj.weight": (width, size * heads),
    }
    if attn.get("qkv_proj_bias", True):
        shapes[f"{mixer}in_proj.bias"] = (rows,)
    if attn.get("d_conv"):
        shapes[f"{mixer}conv1d.weight"] = (rows, 1, attn["d_conv"])
        shapes[f"{mixer}conv1d.bias"] = (rows,)
    if attn.get("out_proj_bias", True):
        shapes[f"{mixer}out_proj.bias"] = (width,)
    return shapes
