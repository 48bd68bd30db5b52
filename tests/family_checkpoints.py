"""A tiny random checkpoint of every family: one that has all that the family may have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests import transformers_checkpoints as hf
from tests.mamba_in_llama import save_mamba_in_llama
from tests.state_spaces_checkpoints import save_codestral, save_mambabyte

# Random weights of these families amplify a difference some fifty times, which would hide what the
# difference is of. With larger embeddings it is less than ten times, as of the other families.
CALM: dict[str, Any] = {"embedding": 4.0}
CALM_TIED: dict[str, Any] = {"embedding": 4.0, "final": 0.05}

Save = Callable[[Path], Path]
SAVE: dict[str, Save] = {
    "arcee": hf.save_arcee,
    "bamba": hf.save_bamba,
    "falcon_h1": partial(hf.save_falcon_h1, mamba_rms_norm=True),
    "falcon_mamba": partial(hf.save_falcon_mamba, hidden_size=32),
    "gemma": hf.save_gemma,
    "gemma2": partial(hf.save_gemma2, sliding_window=13, max_position_embeddings=64),
    "gemma3_text": partial(hf.save_gemma3, sliding_window=13, max_position_embeddings=64),
    "gpt_neox": partial(hf.save_gpt_neox, num_attention_heads=2, max_position_embeddings=64),
    "granite": hf.save_granite,
    "granitemoe": partial(hf.save_with_experts, family="granitemoe", residual_multiplier=0.5),
    "granitemoeshared": partial(
        hf.save_with_experts,
        family="granitemoeshared",
        shared_intermediate_size=24,
        **hf.GRANITE,
    ),
    "granitemoehybrid": partial(
        hf.save_granite_hybrid,
        num_local_experts=6,
        num_experts_per_tok=3,
        intermediate_size=32,
    ),
    "jamba": partial(hf.save_jamba, num_experts=5),
    "lfm2": hf.save_lfm2,
    "lfm3": hf.save_lfm3,
    "lfm2_moe": partial(
        hf.save_with_experts,
        family="lfm2_moe",
        num_dense_layers=1,
        routed_scaling_factor=1.5,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "llama": partial(
        hf.save_llama,
        head_dim=12,
        max_position_embeddings=2048,
        rope_parameters=hf.LLAMA3 | {"rope_theta": 100.0, "original_max_position_embeddings": 64},
    ),
    "mamba_in_llama": partial(save_mamba_in_llama, mamba2=False),
    "mamba": partial(hf.save_mamba, hidden_size=32),
    "mamba2": hf.save_mamba2,
    "mambabyte": partial(save_mambabyte, d_model=32),
    "mistral": partial(hf.save_mistral, sliding_window=4, max_position_embeddings=64),
    "mistral_mamba": save_codestral,
    "mixtral": partial(hf.save_with_experts, family="mixtral"),
    "nemotron_h": partial(
        hf.save_nemotron_h,
        num_hidden_layers=5,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=40,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"],
    ),
    "olmo2": hf.save_olmo2,
    "olmo3": partial(
        hf.save_olmo3,
        sliding_window=13,
        head_dim=12,
        hidden_size=48,
        max_position_embeddings=64,
    ),
    "olmo_hybrid": hf.save_olmo_hybrid,
    "phi3": partial(hf.save_phi3, sliding_window=20),
    "qwen2": partial(hf.save_qwen2, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": hf.save_qwen3,
    "qwen3_5": partial(hf.save_qwen3_5, **CALM),
    "qwen3_5_moe": partial(hf.save_qwen3_5_moe, stacked=True, **CALM),
    "qwen3_next": partial(
        hf.save_with_experts,
        family="qwen3_next",
        **CALM,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "qwen3_moe": partial(
        hf.save_with_experts, family="qwen3_moe", head_dim=12, decoder_sparse_step=2
    ),
    "qwen2_moe": partial(
        hf.save_with_experts, family="qwen2_moe", shared_expert_intermediate_size=24
    ),
    "smollm3": hf.save_smollm3,
    "zamba": partial(hf.save_zamba, hidden_size=32, **CALM_TIED),
    "zamba2": partial(hf.save_zamba2, hidden_size=32, **CALM_TIED),
}
