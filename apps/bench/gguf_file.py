"""The same weights as a GGUF file, stored as llama.cpp's own converter stores Mamba.

Matrices are quantized; norms, biases, D, the convolution and A are fp32, A as -exp(A_log).
A matrix whose rows do not divide into blocks of 32 (dt_proj: 48) stays fp16. The file has no
vocabulary: only token ids are run.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from edge.apps.bench.model import EPS, Array, read_weights
from edge.apps.bench.shapes import Shape

KINDS = ("f16", "q8_0", "q4_0")
BLOCK = 32

_MIXER_NAMES = {
    "in_proj.weight": "ssm_in.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "x_proj.weight": "ssm_x.weight",
    "dt_proj.weight": "ssm_dt.weight",
    "dt_proj.bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "out_proj.weight": "ssm_out.weight",
}
_ENDS = {
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
}


def write_gguf(shape: Shape, checkpoint: Path, path: Path, kind: str) -> Path:
    """Write a checkpoint of `shape` to `path`; `kind` is one of KINDS. Needs the gguf package."""
    gguf = importlib.import_module("gguf")
    writer = gguf.GGUFWriter(path, "mamba")
    _describe(writer, gguf, shape, kind)
    for name, tensor in read_weights(checkpoint).items():
        _add(writer, gguf, gguf_name(name), tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor of `MambaForCausalLM`."""
    if name in _ENDS:
        return _ENDS[name]
    _, _, layer, *rest = name.split(".")
    if rest[0] == "norm":
        return f"blk.{layer}.attn_norm.weight"
    return f"blk.{layer}.{_MIXER_NAMES['.'.join(rest[1:])]}"


def _describe(writer: Any, gguf: Any, shape: Shape, kind: str) -> None:
    writer.add_name(f"random mamba {shape.name}")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(shape.d_model)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(shape.layers)
    writer.add_ssm_conv_kernel(shape.d_conv)
    writer.add_ssm_inner_size(shape.d_inner)
    writer.add_ssm_state_size(shape.d_state)
    writer.add_ssm_time_step_rank(shape.dt_rank)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add(writer: Any, gguf: Any, name: str, tensor: Array, kind: str) -> None:
    if name.endswith("ssm_a"):
        tensor = -np.exp(tensor)
    if name.endswith("ssm_conv1d.weight"):
        tensor = tensor[:, 0, :]
    matrix = tensor.ndim == 2 and name.endswith(".weight") and "conv1d" not in name
    stored = "f32" if not matrix else "f16" if tensor.shape[-1] % BLOCK else kind
    qtype = gguf.GGMLQuantizationType[stored.upper()]
    packed = gguf.quants.quantize(np.ascontiguousarray(tensor), qtype)
    writer.add_tensor(name, packed, raw_dtype=qtype)
