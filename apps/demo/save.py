"""Write a network as an ordinary checkpoint folder: Bamba, Mamba, Mamba-2 or state-spaces' own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from edge.apps.demo.cards import card_text
from edge.apps.demo.data import load_tokenizer
from edge.apps.demo.tokenizer import END, write_tokenizer_files
from edge.config import AttentionConfig, Mamba2Config, MlpConfig, ModelConfig
from edge.export.checkpoint import find_layout
from edge.export.checkpoint.fields import Fields
from edge.export.distill.folders import replace_folder
from edge.export.distill.transformers_config import FAMILIES, common_fields
from edge.export.network import Network

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 128}
BYTES_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ message['role'] | capitalize }}: {{ message['content'] + '\\n\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}"
)
Values = dict[str, Any]


def _first_layer(config: ModelConfig, kind: str) -> Any:
    return next(layer for layer in config.layers if layer.kind == kind)


def bamba_config(config: ModelConfig) -> Values:
    """Return config.json of transformers' `BambaForCausalLM`. Two of our layers are one of its."""
    mamba: Mamba2Config = _first_layer(config, "mamba2")
    attention: AttentionConfig = _first_layer(config, "attention")
    mlp: MlpConfig = _first_layer(config, "mlp")
    mixers = config.layers[::2]
    assert attention.rope is not None and 2 * attention.rope.dim == attention.head_dim
    return common_fields(config) | {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "intermediate_size": mlp.d_intermediate,
        "num_hidden_layers": len(mixers),
        "attn_layer_indices": [i for i, mixer in enumerate(mixers) if mixer.attends],
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
        "rms_norm_eps": config.norm.eps,
    }


def state_spaces_config(config: ModelConfig) -> Values:
    """Return config.json of state-spaces/mamba's `MambaLMHeadModel`."""
    return {
        "d_model": config.d_model,
        "d_intermediate": 0,
        "n_layer": len(config.layers),
        "vocab_size": config.vocab_size,
        "ssm_cfg": _ssm_cfg(config.layers[0], config.d_model),
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": True,
    }


CONFIGS = {**FAMILIES, "bamba": bamba_config}


# kind → its name in ssm_cfg, and names of fields there that only this kind has → our fields
_SSM = {
    "mamba1": ("Mamba1", {"dt_rank": "dt_rank"}),
    "mamba2": ("Mamba2", {"headdim": "head_dim", "ngroups": "n_groups"}),
}


def _ssm_cfg(mamba: Any, d_model: int) -> Values:
    layer, own = _SSM[mamba.kind]
    sizes = {
        "d_state": mamba.d_state,
        "d_conv": mamba.d_conv,
        "expand": mamba.d_inner // d_model,
    }
    return {"layer": layer} | sizes | {name: getattr(mamba, field) for name, field in own.items()}


def _write_json(path: Path, value: Values) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_checkpoint(network: Network, folder: Path, tokenizer: Path | None) -> None:
    """Write a checkpoint for transformers, or for state-spaces/mamba if the model reads bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config, generation = network.config, dict[str, Any](SAMPLING)
    if tokenizer is None:
        values = state_spaces_config(config)
        (folder / "chat_template.jinja").write_text(BYTES_TEMPLATE)
        generation["stop_strings"] = ["\n\n"]
    else:
        model = load_tokenizer(tokenizer)
        eos, pad = int(model.piece_to_id(END)), int(model.eos_id())
        special = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad}
        values = CONFIGS[config.family](config) | special
        generation |= {"eos_token_id": eos, "pad_token_id": pad}
        write_tokenizer_files(tokenizer, folder)
    _write_json(folder / "config.json", values)
    _write_json(folder / "generation_config.json", generation)
    # store tensors under the names and shapes that export reads
    _, layout = find_layout(Fields(folder / "config.json", values))
    tensors = {n: p.detach().cpu().contiguous() for n, p in network.canonical_tensors().items()}
    stored = {p.source: tensors[n].reshape(p.source_shape) for n, p in layout.pieces.items()}
    if tokenizer is None:
        stored |= {head: tensors["embedding.weight"] for head in layout.tied_heads}
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def save_model(network: Network, out: Path, tokenizer: Path | None, card: Values) -> None:
    """Replace out/checkpoint and out/card.json."""
    temporary = out / ".checkpoint.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    write_checkpoint(network, temporary, tokenizer)
    (temporary / "README.md").write_text(card_text(card), encoding="utf-8")
    replace_folder(temporary, out / "checkpoint")
    _write_json(out / "card.json", card)
