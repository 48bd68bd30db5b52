"""The random weights of `make bench`: by canonical name, in GGUF, and in transformers."""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.apps.bench.models import DT_RANGE, EMBEDDING_STD
from edge.config import Mamba1Config, Mamba2Config, ModelConfig
from edge.errors import EngineError
from edge.tensors import tensor_shapes

Array = NDArray[np.float32]
# gain of B and C, which makes the state's part of an output as large as D·x
STATE_GAIN = 4.0


def _mixer(config: ModelConfig) -> Mamba1Config | Mamba2Config:
    return config.layers_of(Mamba1Config).get(0) or config.layers_of(Mamba2Config)[0]


def mamba_tensors(config: ModelConfig) -> dict[str, Array]:
    """Return the canonical tensors that every peer of `make bench` gets, the same every time.

    They are drawn as Mamba initializes, so that states neither decay nor grow. Every part is large
    enough to matter: a lost state changes the logits far more than rounding does.
    """
    rng, shapes = np.random.default_rng(20260101), tensor_shapes(config)
    outer = [name for name in shapes if not name.startswith("layers.")]
    names = [*outer, *(name for name in shapes if name.startswith("layers."))]
    return {name: _draw_mamba(rng, name, shapes[name], config) for name in names}


def _draw_mamba(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], config: ModelConfig
) -> Array:
    def normal(std: float) -> Array:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    def uniform(low: float, high: float) -> Array:
        return rng.random(shape, dtype=np.float32) * np.float32(high - low) + np.float32(low)

    if name == "embedding.weight":
        return normal(EMBEDDING_STD)
    if name == "norm_f.weight":  # makes logits differ by about one
        return np.float32(1 / EMBEDDING_STD / math.sqrt(config.d_model)) * uniform(0.8, 1.2)
    part = name.split(".", 2)[2]
    if part in {"norm.weight", "gated_norm.weight"}:
        return uniform(0.8, 1.2)
    if part == "A_log" and len(shape) == 1:
        return np.log(uniform(1, 16))
    if part == "A_log":
        rates = np.arange(1, shape[1] + 1, dtype=np.float32)
        return np.log(np.tile(rates, (shape[0], 1))) + normal(0.05)
    if part == "D":
        return uniform(0.5, 1.5)
    if part in {"dt_proj.bias", "dt_bias"}:
        delta = np.exp(uniform(*(math.log(bound) for bound in DT_RANGE)))
        return np.log(np.expm1(delta))  # inverse of softplus
    mixer = _mixer(config)
    if part.startswith("conv1d"):
        bound = 1 / math.sqrt(mixer.d_conv)
        return uniform(-bound, bound)
    matrix = normal(1 / math.sqrt(shape[-1]))
    projection, rows = mixer.BC_rows
    if part == f"{projection}.weight":
        matrix[rows] *= np.float32(STATE_GAIN)
    return matrix


def transformers_model(config: ModelConfig) -> Any:
    """Return transformers' causal language model with the weights of `mamba_tensors`, fp32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from edge.export.checkpoint.state_spaces import place_transformers
    from edge.export.distill.transformers_config import FAMILIES

    hf_config = AutoConfig.for_model(**FAMILIES[config.family](config))
    with no_init_weights():  # all are replaced
        model = AutoModelForCausalLM.from_config(hf_config)
    tensors, places = mamba_tensors(config), place_transformers(config).pieces
    weights = {
        place.source: torch.tensor(tensors[name]).reshape(place.source_shape)
        for name, place in places.items()
    }
    absent, unknown = model.load_state_dict(weights, strict=False)
    assert absent == ["lm_head.weight"] and not unknown  # the head is tied to the embedding
    model.tie_weights()
    return model.eval()


def write_gguf(config: ModelConfig, path: Path) -> Path:
    """Write the same weights in fp16, as llama.cpp's converter stores them.

    Norms, biases, D, the convolution and A are fp32, A as -exp(A_log). The file has no vocabulary,
    because only token ids are run. Needs the package gguf.
    """
    gguf = importlib.import_module("gguf")
    mixer = _mixer(config)
    writer = gguf.GGUFWriter(path, config.family)
    for field, value in {
        "name": f"random {config.family}", "context_length": 1 << 20,
        "embedding_length": config.d_model,
        "feed_forward_length": 0, "head_count": 0, "block_count": len(config.layers),
        "ssm_conv_kernel": mixer.d_conv, "ssm_inner_size": mixer.d_inner,
        "ssm_state_size": mixer.d_state,
        "layer_norm_rms_eps": config.norm.eps, "vocab_size": config.vocab_size,
        "tokenizer_model": "no_vocab", "file_type": gguf.LlamaFileType.MOSTLY_F16,
        "quantization_version": gguf.GGML_QUANT_VERSION,
    }.items():  # fmt: skip
        getattr(writer, f"add_{field}")(value)
    add_sizes, stored_as = _GGUF[mixer.kind]
    add_sizes(writer, mixer)
    for name, tensor in mamba_tensors(config).items():
        matrix = name.endswith(".weight") and tensor.ndim == 2 and "conv1d" not in name
        values = -np.exp(tensor) if name.endswith(".A_log") else tensor
        stored = np.ascontiguousarray(stored_as(name.split(".", 2)[-1], values, mixer))
        writer.add_tensor(gguf_name(name), stored.astype(np.float16) if matrix else stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantize_gguf(source: Path, path: Path, kind: str) -> Path:
    """Quantize a file as llama.cpp's own `llama-quantize` does. `kind`: q8_0 or q4_0.

    Its rules decide the type of each matrix: in q4_0, a tied embedding has 6 bits. Needs the
    package llama-cpp-python. Raises EngineError if it fails.
    """
    llama = importlib.import_module("llama_cpp")
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    names = (str(source).encode(), str(path).encode())
    if llama.llama_model_quantize(*names, ctypes.byref(parameters)):
        raise EngineError(f"llama.cpp cannot quantize the file to {kind}", file=source)
    return path


def _add_mamba1(writer: Any, mixer: Mamba1Config) -> None:
    writer.add_ssm_time_step_rank(mixer.dt_rank)


def _add_mamba2(writer: Any, mixer: Mamba2Config) -> None:
    writer.add_ssm_time_step_rank(mixer.n_heads)
    writer.add_ssm_group_count(mixer.n_groups)


def _stored_mamba2(part: str, tensor: Array, mixer: Mamba2Config) -> Array:
    if part in {"A_log", "D"}:
        return tensor[:, None]
    return tensor.reshape(mixer.n_groups, -1) if part == "gated_norm.weight" else tensor


# kind of mixer → what adds its sizes to a file, and the shapes in which the file has its tensors
_GGUF: dict[str, tuple[Callable[[Any, Any], None], Callable[[str, Array, Any], Array]]] = {
    "mamba1": (_add_mamba1, lambda part, tensor, mixer: tensor),
    "mamba2": (_add_mamba2, _stored_mamba2),
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a canonical tensor."""
    top_level = {"embedding.weight": "token_embd.weight", "norm_f.weight": "output_norm.weight"}
    if name in top_level:
        return top_level[name]
    _, index, rest = name.split(".", 2)
    names = {
        "norm.weight": "attn_norm.weight", "A_log": "ssm_a", "D": "ssm_d",
        "gated_norm.weight": "ssm_norm.weight", "dt_bias": "ssm_dt.bias",
    }  # fmt: skip
    tensor = names.get(rest) or "ssm_" + rest.replace("_proj", "")
    return f"blk.{index}.{tensor}"
