"""Tiny random checkpoints of every family that transformers has a class for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from tests.checkpoints import VOCABULARY, randomise, save_tokenizer

_LAST_NORMS = ("model.norm.weight", "final_layernorm.weight")


def save(
    family: str,
    values: dict[str, Any],
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    embedding: float = 1.0,
    final: float = 1.0,
    **overrides: Any,
) -> Path:
    """Save a model of transformers' class for a `model_type`, with random weights and a tokenizer.

    `embedding` scales the embedding, and so the logits of a tied head; `final` scales the last
    norm, and so all logits. A large embedding and a small `final` make a model that amplifies
    differences less, because its blocks add little to the stream.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    given = {"vocab_size": VOCABULARY, **values, **overrides}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given))
    randomise(model)
    model.get_input_embeddings().weight.data *= embedding
    for name, parameter in model.named_parameters():
        if name.endswith(_LAST_NORMS):
            parameter.data *= final
    model.to(dtype).save_pretrained(path)
    return save_tokenizer(path)


_ENDS: dict[str, Any] = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
_MAMBA1: dict[str, Any] = dict(hidden_size=24, num_hidden_layers=2, state_size=5, conv_kernel=4)
# width 24, 5 states, tied
save_mamba = partial(save, "mamba", _MAMBA1)
save_falcon_mamba = partial(save, "falcon_mamba", _MAMBA1)
# 8 heads of 8, 2 groups, untied
save_mamba2 = partial(
    save, "mamba2",
    _ENDS | dict(
        hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=6, n_groups=2,
        chunk_size=16,
    ),
)  # fmt: skip

# 2 blocks, 4 heads of 8, 2 for KV
_LLAMA: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
_PADDED = _LLAMA | _ENDS
save_llama = partial(save, "llama", _LLAMA)
# the RoPE of Llama 3.2
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
save_mistral = partial(save, "mistral", _LLAMA | {"sliding_window": 256})
# parallel blocks, a quarter of each head rotated
save_gpt_neox = partial(
    save, "gpt_neox", {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}
)
# heads of 8, of which three quarters rotate, with LongRoPE
save_phi3 = partial(
    save, "phi3",
    _PADDED | dict(
        original_max_position_embeddings=1024, max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.3, 2.5], "long_factor": [1.0, 4.0, 9.0],
        },
    ),
)  # fmt: skip
# squared-ReLU MLPs
save_arcee = partial(save, "arcee", _LLAMA | {"hidden_act": "relu2"})
save_qwen2 = partial(save, "qwen2", _LLAMA)
save_qwen3 = partial(save, "qwen3", _LLAMA | {"head_dim": 12})
# every second block without RoPE
save_smollm3 = partial(save, "smollm3", _PADDED | {"no_rope_layer_interval": 2})
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "attention_factor": 1.2,
         "original_max_position_embeddings": 64}  # fmt: skip
_LOCAL = {"rope_type": "default", "rope_theta": 100.0}
_SLIDING: dict[str, Any] = dict(
    sliding_window=256, layer_types=["sliding_attention", "full_attention"]
)
# post-norms, over all heads at once
save_olmo2 = partial(save, "olmo2", _PADDED)
save_olmo3 = partial(
    save, "olmo3",
    _PADDED | _SLIDING
    | dict(rope_parameters={"sliding_attention": _LOCAL, "full_attention": _YARN}),
)  # fmt: skip
# heads of 12
save_gemma = partial(save, "gemma", _PADDED | {"head_dim": 12}, embedding=0.2)
# caps that bend scores and logits
save_gemma2 = partial(
    save, "gemma2",
    _PADDED | _SLIDING | dict(
        head_dim=12, query_pre_attn_scalar=2, attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    embedding=0.2,
)  # fmt: skip
save_gemma3 = partial(
    save, "gemma3_text",
    _PADDED | _SLIDING | dict(
        head_dim=12, query_pre_attn_scalar=20,
        rope_parameters={
            "sliding_attention": _LOCAL,
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        },
    ),
    embedding=0.2,
)  # fmt: skip
GRANITE: dict[str, Any] = dict(
    embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
    logits_scaling=1.7, tie_word_embeddings=True,
)  # fmt: skip
save_granite = partial(save, "granite", _LLAMA | GRANITE)

_MAMBA: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=16
)
# the second of these hybrids' 3 blocks has attention
save_bamba = partial(
    save, "bamba", _PADDED | _MAMBA | dict(num_hidden_layers=3, attn_layer_indices=[1])
)
# without experts
save_granite_hybrid = partial(
    save, "granitemoehybrid",
    _PADDED | GRANITE | _MAMBA | dict(
        num_hidden_layers=3, num_local_experts=0, shared_intermediate_size=40,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
)  # fmt: skip
# heads of 12, factors everywhere
save_falcon_h1 = partial(
    save, "falcon_h1",
    _PADDED | _MAMBA | dict(
        head_dim=12, mamba_d_ssm=64, mamba_n_groups=1,
        embedding_multiplier=3.0, lm_head_multiplier=0.6, key_multiplier=0.7,
        attention_in_multiplier=1.3, attention_out_multiplier=0.9, mlp_multipliers=[0.8, 1.4],
        ssm_in_multiplier=1.25, ssm_out_multiplier=0.6, ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 1.3],
    ),
)  # fmt: skip
# without experts
save_jamba = partial(
    save, "jamba",
    _PADDED | dict(
        num_hidden_layers=3, num_experts=1, attn_layer_period=3, attn_layer_offset=1,
        mamba_d_state=5, use_mamba_kernels=False,
    ),
)  # fmt: skip
# without experts: M-*M, 8 heads of 6, 2 groups
save_nemotron_h = partial(
    save, "nemotron_h",
    _PADDED | dict(
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        head_dim=12, mamba_num_heads=8, mamba_head_dim=6, n_groups=2, ssm_state_size=5,
        chunk_size=16, time_step_min=1e-30, num_hidden_layers=4,
    ),
)  # fmt: skip
save_lfm2 = partial(
    save, "lfm2",
    _PADDED | dict(
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8
    ),
)  # fmt: skip
# every kind of block; where attention is global, half of a head's pairs rotate
save_lfm3 = partial(
    save, "lfm3",
    _PADDED | dict(
        num_hidden_layers=4, layer_types=["conv", "full_attention", "sliding_attention", "conv"],
        head_dim=16, sliding_window=3, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 200.0, "partial_rotary_factor": 0.5,
            },
        },
    ),
)  # fmt: skip
# a larger epsilon: with small values a norm amplifies rounding
_DELTANET: dict[str, Any] = dict(
    rms_norm_eps=1e-3,
    head_dim=16, linear_key_head_dim=6, linear_value_head_dim=10, linear_num_key_heads=2,
    linear_num_value_heads=4, rope_parameters={
        "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
)  # fmt: skip
# the third block has attention
save_qwen3_5 = partial(
    save, "qwen3_5_text",
    _PADDED | _DELTANET | dict(
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    ),
)  # fmt: skip


def save_olmo_hybrid(path: Path, **given: Any) -> Path:
    """Save two blocks, the second with attention. The convolutions are stored as in the hub's
    files, not in three parts as `save_pretrained` of this version does.
    """
    sizes = {"linear_key_head_dim": 6, "linear_value_head_dim": 10, "rms_norm_eps": 1e-3}
    made = _PADDED | sizes | {"layer_types": ["linear_attention", "full_attention"]} | given
    save("olmo_hybrid", made, path, embedding=0.2)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        parts = [name.replace("q_conv1d", f"{which}_conv1d") for which in "qkv"]
        rows = [len(tensors[part.replace("conv1d", "proj")]) for part in parts]
        joined = torch.cat([tensors[part] for part in parts])
        tensors |= dict(zip(parts, map(torch.clone, joined.split(rows)), strict=True))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def save_beside_images(path: Path) -> Path:
    """Save Qwen3.5 as it is published: the text model inside a larger multimodal one."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    text = _PADDED | _DELTANET | {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
    text |= {"layer_types": ["linear_attention", "full_attention"]}
    sees = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(
            "qwen3_5", text_config=text, vision_config=sees, tie_word_embeddings=True
        )
    )
    randomise(model)
    model.get_input_embeddings().weight.data *= 0.2
    model.save_pretrained(path)
    return save_tokenizer(path)


# 3 Mamba-2 layers, two with the shared block, adapted
save_zamba2 = partial(
    save, "zamba2",
    _PADDED | dict(
        num_hidden_layers=3, layers_block_type=["hybrid", "hybrid", "mamba"], hidden_size=16,
        num_key_value_heads=4, mamba_d_state=6, n_mamba_heads=8, mamba_ngroups=2, adapter_rank=3,
        use_shared_attention_adapter=True, use_mem_rope=True, chunk_size=16, time_step_min=1e-30,
    ),
    embedding=0.2,
)  # fmt: skip
# 4 Mamba layers of two heads, two with the shared block
save_zamba = partial(
    save, "zamba",
    _PADDED | dict(
        num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        hidden_size=16, num_key_value_heads=2, mamba_d_state=6, mamba_dt_rank=3, n_mamba_heads=2,
        hidden_act="gelu", tie_word_embeddings=True,
    ),
    embedding=0.2,
)  # fmt: skip


def save_with_experts(path: Path, family: str, **given: Any) -> Path:
    """Save the version of a family with experts: 6 of 32, and 3 per token."""
    sizes = {"num_local_experts": 6}
    if family in ("lfm2_moe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        sizes = {"num_experts": 6, "moe_intermediate_size": 32}
    own = _DELTANET if family in ("qwen3_next", "qwen3_5_moe_text") else {}
    values = _PADDED | own | sizes | dict(num_hidden_layers=3, num_experts_per_tok=3)
    return save(family, values, path, **given)


def save_qwen3_5_moe(path: Path, stacked: bool, **given: Any) -> Path:
    """The third block has attention; `stacked`: experts lie in two tensors a block, as in some
    files.
    """
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    given = {"layer_types": kinds, "shared_expert_intermediate_size": 24} | given
    save_with_experts(path, "qwen3_5_moe_text", **given)
    if not stacked:
        return path
    tensors = load_file(path / "model.safetensors")
    for gate in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        theirs = gate.removesuffix("gate.weight") + "experts"
        names = ("gate_proj", "up_proj", "down_proj")
        each = [
            torch.stack([tensors.pop(f"{theirs}.{e}.{name}.weight") for e in range(6)])
            for name in names
        ]
        tensors |= {
            f"{theirs}.gate_up_proj": torch.cat(each[:2], 1),
            f"{theirs}.down_proj": each[2],
        }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path
