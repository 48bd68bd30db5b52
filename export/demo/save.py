"""Write a network as an ordinary checkpoint directory: Bamba, Mamba-2 or state-spaces original."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from edge.config import AttentionConfig, Mamba2Config, MlpConfig, ModelConfig
from edge.export.demo.cards import card_text
from edge.export.demo.checkpoint import replace_folder
from edge.export.demo.tokenizer import END, load_tokenizer, write_tokenizer_files
from edge.export.network import Network

Tensors = dict[str, Tensor]
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 128}
BYTES_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ message['role'] | capitalize }}: {{ message['content'] + '\\n\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}"
)


def _mamba2(config: ModelConfig) -> Mamba2Config:
    return next(layer for layer in config.layers if isinstance(layer, Mamba2Config))


def _mixer_names(name: str) -> str:
    return name.replace("gated_norm.", "norm.")


def _with_conv_axis(name: str, tensor: Tensor) -> Tensor:
    """Conv weights [C, K] are stored [C, 1, K]."""
    return tensor[:, None].contiguous() if name.endswith("conv1d.weight") else tensor


def bamba_tensors(config: ModelConfig, tensors: Tensors) -> Tensors:
    """Canonical names → transformers' `BambaForCausalLM`: two of our layers are one of its."""
    renamed: Tensors = {
        "model.embed_tokens.weight": tensors["embedding.weight"],
        "model.final_layernorm.weight": tensors["norm_f.weight"],
    }
    for index, layer in enumerate(config.layers):
        prefix, block = f"layers.{index}.", f"model.layers.{index // 2}"
        mlp = isinstance(layer, MlpConfig)
        room = (
            "feed_forward" if mlp else "mamba" if isinstance(layer, Mamba2Config) else "self_attn"
        )
        for name, tensor in tensors.items():
            if not name.startswith(prefix):
                continue
            local = name.removeprefix(prefix)
            if local == "norm.weight":
                local = "pre_ff_layernorm.weight" if mlp else "input_layernorm.weight"
                renamed[f"{block}.{local}"] = tensor
            else:
                renamed[f"{block}.{room}.{_mixer_names(local)}"] = _with_conv_axis(local, tensor)
    return renamed


def bamba_config(config: ModelConfig, eos: int, pad: int) -> dict[str, Any]:
    mamba = _mamba2(config)
    mixers, mlps = config.layers[::2], config.layers[1::2]
    attention = next(layer for layer in mixers if isinstance(layer, AttentionConfig))
    assert attention.rope is not None and 2 * attention.rope.dim == attention.head_dim
    assert isinstance(mlps[0], MlpConfig)
    return {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": mlps[0].d_intermediate,
        "num_hidden_layers": len(mixers),
        "attn_layer_indices": [i for i, m in enumerate(mixers) if isinstance(m, AttentionConfig)],
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.max_context,
        "rope_theta": attention.rope.theta,
        "partial_rotary_factor": 0.5,
        "mamba_n_heads": mamba.n_heads,
        "mamba_d_head": mamba.head_dim,
        "mamba_n_groups": mamba.n_groups,
        "mamba_d_state": mamba.d_state,
        "mamba_d_conv": mamba.d_conv,
        "mamba_expand": mamba.d_inner // config.d_model,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": mamba.conv_bias,
        "mamba_proj_bias": mamba.proj_bias,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def mamba2_tensors(tensors: Tensors) -> Tensors:
    """Canonical names → transformers' `Mamba2ForCausalLM`."""
    inside = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    head = {} if len(inside) == len(tensors) else {"lm_head.weight": tensors["lm_head.weight"]}
    return head | {
        name.replace("embedding.", "embeddings."): tensor
        for name, tensor in state_spaces_tensors(inside).items()
        if name != "lm_head.weight"
    }


def mamba2_config(config: ModelConfig, eos: int, pad: int) -> dict[str, Any]:
    mamba = _mamba2(config)
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": len(config.layers),
        "num_heads": mamba.n_heads,
        "head_dim": mamba.head_dim,
        "n_groups": mamba.n_groups,
        "state_size": mamba.d_state,
        "conv_kernel": mamba.d_conv,
        "expand": mamba.d_inner // config.d_model,
        "chunk_size": 64,
        "use_bias": mamba.proj_bias,
        "use_conv_bias": mamba.conv_bias,
        "hidden_act": "silu",
        "layer_norm_epsilon": config.norm.eps,
        "residual_in_fp32": True,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def state_spaces_tensors(tensors: Tensors) -> Tensors:
    """Canonical names → state-spaces/mamba's `MambaLMHeadModel`, the tied head included."""
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] != "norm":
            local = _mixer_names(".".join(parts[2:]))
            name = f"layers.{parts[1]}.mixer.{local}"
        renamed[f"backbone.{name}"] = _with_conv_axis(name, tensor)
    renamed["lm_head.weight"] = tensors["embedding.weight"]
    return renamed


def state_spaces_config(config: ModelConfig) -> dict[str, Any]:
    mamba = _mamba2(config)
    return {
        "d_model": config.d_model,
        "d_intermediate": 0,
        "n_layer": len(config.layers),
        "vocab_size": config.vocab_size,
        "ssm_cfg": {
            "layer": "Mamba2",
            "d_state": mamba.d_state,
            "d_conv": mamba.d_conv,
            "expand": mamba.d_inner // config.d_model,
            "headdim": mamba.head_dim,
            "ngroups": mamba.n_groups,
        },
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": True,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_checkpoint(network: Network, folder: Path, tokenizer: Path | None) -> None:
    """Fill `folder`: Bamba or Mamba-2 for transformers, or state-spaces where there are bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = network.config
    tensors = {n: p.detach().cpu().contiguous() for n, p in network.canonical_tensors().items()}
    if tokenizer is None:
        _write_json(folder / "config.json", state_spaces_config(config))
        torch.save(state_spaces_tensors(tensors), folder / "pytorch_model.bin")
        (folder / "chat_template.jinja").write_text(BYTES_TEMPLATE)
        stops = {"stop_strings": ["\n\n"]}
        _write_json(folder / "generation_config.json", SAMPLING | stops)
        return
    model = load_tokenizer(tokenizer)
    eos, pad = int(model.piece_to_id(END)), int(model.eos_id())
    if config.has_attention:
        written, values = bamba_tensors(config, tensors), bamba_config(config, eos, pad)
    else:
        written, values = mamba2_tensors(tensors), mamba2_config(config, eos, pad)
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", values)
    ids = {"eos_token_id": eos, "pad_token_id": pad}
    _write_json(folder / "generation_config.json", SAMPLING | ids)
    write_tokenizer_files(tokenizer, folder)


def save_model(network: Network, out: Path, tokenizer: Path | None, card: dict[str, Any]) -> None:
    """out/checkpoint and out/card.json, replaced whole."""
    temporary = out / ".checkpoint.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    write_checkpoint(network, temporary, tokenizer)
    (temporary / "README.md").write_text(card_text(card), encoding="utf-8")
    replace_folder(temporary, out / "checkpoint")
    _write_json(out / "card.json", card)
