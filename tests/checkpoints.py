"""Writes tiny random checkpoints, as the real ones are laid out, for tests to read.

Every tensor is random, norms and biases too, so that no constant can hide a mistake. A directory
has a working tokenizer where its family has one: byte-level BPE, 272 tokens with padding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers.utils import logging

from edge.errors import CheckpointError
from edge.export.checkpoint import open_checkpoint

TOKENS = 270  # what the tokenizer has
VOCABULARY = 272  # what the models have: padded to a multiple of 8
END = "<|endoftext|>"
CORPUS = ["the state of the model is the whole of the past", "a robot walks and then it stops"]


def save_tokenizer(path: Path, chat_template: str | None = None) -> Path:
    """tokenizer.json with at most TOKENS tokens, END being 0, and the small files beside it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(
        path / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END},
    )
    write_json(path / "special_tokens_map.json", {"eos_token": END, "bos_token": END})
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    return path


def write_json(path: Path, value: object) -> None:
    """`value` as JSON, with bare Infinity where it holds one, as upstream writes it."""
    path.write_text(json.dumps(value, indent=2))


def edit_config(path: Path, **changes: object) -> None:
    """Set fields of config.json; a value of ... removes the field."""
    file = path / "config.json"
    values = json.loads(file.read_text()) | changes
    write_json(file, {k: v for k, v in values.items() if v is not ...})


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """fp32 values in a range that such a tensor has, so that states neither vanish nor explode."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    if name.endswith("A_log"):
        return uniform(-1.5, 1.5)
    if name.endswith(("dt_bias", "dt_proj.bias")):
        return uniform(-3.0, 1.0)
    normal = torch.randn(shape, generator=generator)
    if name.endswith(".D"):
        return normal
    if "norm" in name.split(".")[-2]:
        return uniform(0.5, 1.5) if name.endswith("weight") else 0.3 * normal
    if name.endswith("bias"):
        return 0.3 * normal
    if "embed" in name:
        return 0.5 * normal
    return normal / math.sqrt(math.prod(shape[1:]))


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Replace every parameter by `random_tensor`'s."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        routed = [(n, b) for n, b in model.named_buffers() if n.endswith("_bias")]
        for name, parameter in [*sorted(model.named_parameters()), *sorted(routed)]:
            parameter.copy_(random_tensor(name, tuple(parameter.shape), generator))


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


def save_state_spaces(
    path: Path,
    version: int = 1,
    *,
    like: Path | None = None,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """state-spaces' `MambaLMHeadModel`: config.json and pytorch_model.bin, tied.

    `like` takes the weights of a transformers Mamba or Mamba-2 directory, under the original
    names; the overrides must then describe the same model.
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


def save_mambabyte(path: Path, layout: str = "rmsnorm", **overrides: Any) -> Path:
    """MambaByte: `rmsnorm` as the Hub stores it, `layernorm` as the paper's own class does."""
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
    """What MambaLMHeadModel(config).state_dict() holds, written from its source, not from ours."""
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


def refusal(path: Path, *, read: bool = False) -> CheckpointError:
    """The CheckpointError that opening (and reading) it raises, which has a place and a remedy."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint = open_checkpoint(path)
        if read:
            list(checkpoint.tensors())
    assert caught.value.file is not None and caught.value.remedy
    return caught.value
