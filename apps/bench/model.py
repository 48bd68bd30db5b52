"""A checkpoint with random weights, in the format of transformers' `MambaForCausalLM`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edge.apps.bench.shapes import Shape

Array = NDArray[np.float32]

SEED = 20260101
EPS = 1e-5
EMBEDDING_STD = 0.02  # small, or every token would predict itself through the tied head
LOGIT_STD = 1.0
STATE_GAIN = 4.0  # of B and C: what the state adds to an output is then as large as D·x
DT_RANGE = (1e-3, 0.1)  # what Δ is initialised to when Mamba is trained


def write_checkpoint(shape: Shape, path: Path) -> Path:
    """config.json, model.safetensors and a byte-level tokenizer; the same bytes every time."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(random_weights(shape), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_config(shape), indent=1))
    (path / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return path


def read_weights(path: Path) -> dict[str, Array]:
    """The tensors of a checkpoint that `write_checkpoint` wrote."""
    return load_file(path / "model.safetensors")


def random_weights(shape: Shape) -> dict[str, Array]:
    """Drawn as Mamba initialises them, so that states neither die out nor grow, with every part
    loud enough to be missed: a lost state changes the logits far beyond what rounding does.
    """
    rng = np.random.default_rng(SEED)
    last = np.float32(LOGIT_STD / EMBEDDING_STD / math.sqrt(shape.d_model))
    weights: dict[str, Array] = {
        "backbone.embeddings.weight": _normal(
            rng, (shape.vocab_size, shape.d_model), EMBEDDING_STD
        ),
        "backbone.norm_f.weight": last * _uniform(rng, (shape.d_model,), 0.8, 1.2),
    }
    for layer in range(shape.layers):
        prefix = f"backbone.layers.{layer}."
        weights[f"{prefix}norm.weight"] = _uniform(rng, (shape.d_model,), 0.8, 1.2)
        for name, dims in shape.mixer_shapes().items():
            weights[f"{prefix}mixer.{name}"] = _mixer_tensor(rng, name, dims, shape)
    return weights


def _mixer_tensor(
    rng: np.random.Generator, name: str, dims: tuple[int, ...], shape: Shape
) -> Array:
    if name == "A_log":
        rates = np.arange(1, shape.d_state + 1, dtype=np.float32)
        return np.log(np.tile(rates, (shape.d_inner, 1))) + _normal(rng, dims, 0.05)
    if name == "D":
        return _uniform(rng, dims, 0.5, 1.5)
    if name == "dt_proj.bias":
        low, high = (math.log(bound) for bound in DT_RANGE)
        delta = np.exp(_uniform(rng, dims, low, high))
        return np.log(np.expm1(delta))  # softplus of it is delta
    if name.startswith("conv1d"):
        bound = 1 / math.sqrt(shape.d_conv)
        return _uniform(rng, dims, -bound, bound)
    matrix = _normal(rng, dims, 1 / math.sqrt(dims[-1]))
    if name == "x_proj.weight":
        matrix[shape.dt_rank :] *= np.float32(STATE_GAIN)
    return matrix


def _normal(rng: np.random.Generator, dims: tuple[int, ...], std: float) -> Array:
    return rng.standard_normal(dims, dtype=np.float32) * np.float32(std)


def _uniform(rng: np.random.Generator, dims: tuple[int, ...], low: float, high: float) -> Array:
    return rng.random(dims, dtype=np.float32) * np.float32(high - low) + np.float32(low)


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "torch_dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_inner,
        "num_hidden_layers": shape.layers,
        "state_size": shape.d_state,
        "conv_kernel": shape.d_conv,
        "time_step_rank": shape.dt_rank,
        "expand": 2,
        "hidden_act": "silu",
        "layer_norm_epsilon": EPS,
        "use_bias": False,
        "use_conv_bias": True,
        "residual_in_fp32": True,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _tokenizer() -> object:
    """Bytes as tokens: the exporter wants a tokenizer, the measurement uses token ids only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: token for token, piece in enumerate(["<|endoftext|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return json.loads(tokenizer.to_str())
