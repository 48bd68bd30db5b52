"""Make config.json for the transformers classes of the models trained here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, MlpConfig, ModelConfig

Values = dict[str, Any]


def common_fields(config: ModelConfig) -> Values:
    """Return the fields that all these classes have, without the ids of special tokens."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
    }


def mamba_config(config: ModelConfig) -> Values:
    """Return the config of `MambaForCausalLM`."""
    mamba = config.layers_of(Mamba1Config)[0]
    return _recurrent(config, mamba) | {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "time_step_rank": mamba.dt_rank,
    }


def mamba2_config(config: ModelConfig) -> Values:
    """Return the config of `Mamba2ForCausalLM`."""
    mamba = config.layers_of(Mamba2Config)[0]
    return _recurrent(config, mamba) | {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": mamba.n_heads,
        "head_dim": mamba.head_dim,
        "n_groups": mamba.n_groups,
        "chunk_size": 64,
    }


def _recurrent(config: ModelConfig, mamba: Mamba1Config | Mamba2Config) -> Values:
    return common_fields(config) | {
        "num_hidden_layers": len(config.layers),
        "state_size": mamba.d_state,
        "conv_kernel": mamba.d_conv,
        "expand": mamba.d_inner // config.d_model,
        "use_bias": mamba.proj_bias,
        "use_conv_bias": mamba.conv_bias,
        "layer_norm_epsilon": config.norm.eps,
        "residual_in_fp32": True,
    }


def llama_config(config: ModelConfig) -> Values:
    """Return the config of `LlamaForCausalLM`, for equal blocks of attention and an MLP."""
    attention, mlp = config.layers_of(AttentionConfig)[0], config.layers_of(MlpConfig)[1]
    assert attention.rope is not None and config.max_context is not None
    return common_fields(config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": len(config.layers) // 2,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": mlp.d_intermediate,
        "rope_theta": attention.rope.theta,
        "rms_norm_eps": config.norm.eps,
        "max_position_embeddings": config.max_context,
    }


FAMILIES: dict[str, Callable[[ModelConfig], Values]] = {
    "mamba": mamba_config,
    "mamba2": mamba2_config,
    "llama": llama_config,
}
