"""Tiny random checkpoints of every family that transformers has a class of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from tests.checkpoints import VOCABULARY, randomise, save_tokenizer


def _save_transformers(
    path: Path,
    config: Any,
    kind: Callable[[Any], Any],
    dtype: torch.dtype,
    embedding: float = 1.0,
) -> Path:
    """`embedding` multiplies the embedding, and so the logits of a tied head."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = kind(config)
    randomise(model)
    model.get_input_embeddings().weight.data *= embedding
    model.to(dtype).save_pretrained(path)
    return save_tokenizer(path)


def save_mamba(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `MambaForCausalLM`: 2 layers, width 24, 5 states, tied."""
    from transformers import MambaConfig, MambaForCausalLM

    values: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, state_size=5, conv_kernel=4,
    )  # fmt: skip
    config = MambaConfig(**(values | overrides))
    return _save_transformers(path, config, MambaForCausalLM, dtype)


def save_mamba2(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `Mamba2ForCausalLM`: 2 layers, width 32, 8 heads of 8, 2 groups, untied."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    values: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8,
        state_size=6, n_groups=2, chunk_size=16, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    config = Mamba2Config(**(values | overrides))
    return _save_transformers(path, config, Mamba2ForCausalLM, dtype)


def save_bamba(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `BambaForCausalLM`: 3 blocks, the second attends (4 heads, 2 for KV)."""
    from transformers import BambaConfig, BambaForCausalLM

    values: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, attn_layer_indices=[1],
        mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=16,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    config = BambaConfig(**(values | overrides))
    return _save_transformers(path, config, BambaForCausalLM, dtype)


def save_gpt_neox(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `GPTNeoXForCausalLM`: 2 parallel blocks of 4 heads of 8, a quarter turned."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    values: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=512, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config = GPTNeoXConfig(**(values | overrides))
    return _save_transformers(path, config, GPTNeoXForCausalLM, dtype)


_LLAMA: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip


def save_llama(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `LlamaForCausalLM`: 2 blocks, 4 heads of 8, 2 for KV."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(_LLAMA | overrides))
    return _save_transformers(path, config, LlamaForCausalLM, dtype)


def save_mistral(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `MistralForCausalLM`: as `save_llama`, with a window of 256."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**(_LLAMA | {"sliding_window": 256} | overrides))
    return _save_transformers(path, config, MistralForCausalLM, dtype)


def save_phi3(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `Phi3ForCausalLM`: heads of 8, turned by three quarters, with LongRoPE."""
    from transformers import Phi3Config, Phi3ForCausalLM

    values = _LLAMA | dict(
        pad_token_id=0, original_max_position_embeddings=1024, max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.3, 2.5], "long_factor": [1.0, 4.0, 9.0],
        },
    )  # fmt: skip
    return _save_transformers(path, Phi3Config(**(values | overrides)), Phi3ForCausalLM, dtype)


def save_qwen2(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `Qwen2ForCausalLM`: as `save_llama`, with biases of q, k and v."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _save_transformers(path, Qwen2Config(**(_LLAMA | overrides)), Qwen2ForCausalLM, dtype)


def save_qwen3(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `Qwen3ForCausalLM`: as `save_llama`, with heads of 12 that are normed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**(_LLAMA | {"head_dim": 12} | overrides))
    return _save_transformers(path, config, Qwen3ForCausalLM, dtype)


def save_smollm3(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `SmolLM3ForCausalLM`: as `save_llama`, every second block without RoPE."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    values = _LLAMA | {"no_rope_layer_interval": 2, "pad_token_id": 0}
    config = SmolLM3Config(**(values | overrides))
    return _save_transformers(path, config, SmolLM3ForCausalLM, dtype)


def save_falcon_mamba(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `FalconMambaForCausalLM`: as `save_mamba`."""
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    values: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, state_size=5, conv_kernel=4,
    )  # fmt: skip
    config = FalconMambaConfig(**(values | overrides))
    return _save_transformers(path, config, FalconMambaForCausalLM, dtype)


def save_granite(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `GraniteForCausalLM`: as `save_llama`, with factors."""
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(**(_LLAMA | GRANITE | overrides))
    return _save_transformers(path, config, GraniteForCausalLM, dtype)


GRANITE: dict[str, Any] = dict(
    embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
    logits_scaling=1.7, tie_word_embeddings=True,
)  # fmt: skip

_MAMBA: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=16
)


def save_granite_hybrid(
    path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """transformers' `GraniteMoeHybridForCausalLM`: 3 blocks without experts, the second attends."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    values = _LLAMA | GRANITE | _MAMBA | dict(
        num_hidden_layers=3, num_local_experts=0, shared_intermediate_size=40, pad_token_id=0,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )  # fmt: skip
    config = GraniteMoeHybridConfig(**(values | overrides))
    return _save_transformers(path, config, GraniteMoeHybridForCausalLM, dtype)


def save_falcon_h1(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `FalconH1ForCausalLM`: 2 blocks, heads of 12, factors everywhere."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    values = _LLAMA | _MAMBA | dict(
        head_dim=12, mamba_d_ssm=64, mamba_n_groups=1, pad_token_id=0,
        embedding_multiplier=3.0, lm_head_multiplier=0.6, key_multiplier=0.7,
        attention_in_multiplier=1.3, attention_out_multiplier=0.9, mlp_multipliers=[0.8, 1.4],
        ssm_in_multiplier=1.25, ssm_out_multiplier=0.6, ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 1.3],
    )  # fmt: skip
    config = FalconH1Config(**(values | overrides))
    return _save_transformers(path, config, FalconH1ForCausalLM, dtype)


def save_jamba(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `JambaForCausalLM` without experts: 3 blocks, the second attends."""
    from transformers import JambaConfig, JambaForCausalLM

    values = _LLAMA | dict(
        num_hidden_layers=3, num_experts=1, attn_layer_period=3, attn_layer_offset=1,
        mamba_d_state=5, use_mamba_kernels=False, pad_token_id=0,
    )  # fmt: skip
    return _save_transformers(path, JambaConfig(**(values | overrides)), JambaForCausalLM, dtype)


def save_nemotron_h(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `NemotronHForCausalLM` without experts: M-*M, 8 heads of 6, 2 groups."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    values = _LLAMA | dict(
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        head_dim=12, mamba_num_heads=8, mamba_head_dim=6, n_groups=2, ssm_state_size=5,
        chunk_size=16, time_step_min=1e-30, pad_token_id=0, num_hidden_layers=4,
    )  # fmt: skip
    config = NemotronHConfig(**(values | overrides))
    return _save_transformers(path, config, NemotronHForCausalLM, dtype)


def save_lfm2(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `Lfm2ForCausalLM`: 3 blocks, the second attends."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    values = _LLAMA | dict(
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8,
        pad_token_id=0,
    )  # fmt: skip
    return _save_transformers(path, Lfm2Config(**(values | overrides)), Lfm2ForCausalLM, dtype)


def save_with_experts(
    path: Path, family: str, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """transformers' class of a family of the same name with experts, 6 of 32 and 3 a token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_local_experts": 6}
    if family in ("lfm2_moe", "qwen3_moe"):
        sizes = {"num_experts": 6, "moe_intermediate_size": 32}
    values = _LLAMA | sizes | dict(num_hidden_layers=3, num_experts_per_tok=3, pad_token_id=0)
    config = AutoConfig.for_model(family, **(values | overrides))
    return _save_transformers(path, config, AutoModelForCausalLM.from_config, dtype)


def save_zamba2(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `Zamba2ForCausalLM`: 3 Mamba-2 layers, two with the shared block, adapted."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    values = _LLAMA | dict(
        num_hidden_layers=3, layers_block_type=["hybrid", "hybrid", "mamba"], hidden_size=16,
        num_key_value_heads=4, mamba_d_state=6, n_mamba_heads=8, mamba_ngroups=2, adapter_rank=3,
        use_shared_attention_adapter=True, use_mem_rope=True, chunk_size=16, time_step_min=1e-30,
        pad_token_id=0,
    )  # fmt: skip
    config = Zamba2Config(**(values | overrides))
    return _save_transformers(path, config, Zamba2ForCausalLM, dtype, embedding=0.2)


def save_zamba(path: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """transformers' `ZambaForCausalLM`: 4 Mamba layers of two heads, two with the shared block."""
    from transformers import ZambaConfig, ZambaForCausalLM

    values = _LLAMA | dict(
        num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        hidden_size=16, num_key_value_heads=2, mamba_d_state=6, mamba_dt_rank=3, n_mamba_heads=2,
        pad_token_id=0, hidden_act="gelu", tie_word_embeddings=True,
    )  # fmt: skip
    config = ZambaConfig(**(values | overrides))
    return _save_transformers(path, config, ZambaForCausalLM, dtype, embedding=0.2)
