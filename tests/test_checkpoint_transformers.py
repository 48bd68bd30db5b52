"""Configs and tensors of the Transformer families as published, in old and new spellings."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edge.config import AttentionConfig, MlpConfig, ModelConfig, RopeConfig, RopeScaling
from edge.export.checkpoint import open_checkpoint
from edge.export.checkpoint.checkpoint import as_stored
from edge.export.distill.save import source_layout
from tests.checkpoints import edit_config, refusal
from tests.transformers_checkpoints import (
    LLAMA3,
    save_gemma3,
    save_gpt_neox,
    save_granite,
    save_llama,
    save_mistral,
)


def attention_of(config: ModelConfig) -> AttentionConfig:
    layer = config.layers[0]
    assert isinstance(layer, AttentionConfig)
    return layer


def rope_of(path: Path) -> RopeConfig:
    rope = attention_of(open_checkpoint(path).config).rope
    assert rope is not None
    return rope


def test_gpt_neox_blocks_are_attention_and_a_parallel_mlp(tmp_path: Path) -> None:
    config = open_checkpoint(save_gpt_neox(tmp_path)).config
    assert config.family == "gpt_neox" and config.norm.kind == "layernorm"
    attention = AttentionConfig(
        n_heads=4, n_kv_heads=4, head_dim=8, rope=RopeConfig(dim=2), qkv_bias=True, out_bias=True
    )
    mlp = MlpConfig(d_intermediate=40, bias=True, form="gelu", parallel=True)
    assert config.layers == (attention, mlp) * 2
    assert not config.tie_embeddings and config.max_context == 512


def test_pythias_config_and_buffers(tmp_path: Path) -> None:
    """As EleutherAI wrote them: rotary_pct, masks beside the weights, the head as embed_out."""
    save_gpt_neox(tmp_path)
    expected = open_checkpoint(tmp_path)
    edit_config(
        tmp_path, rope_parameters=..., rotary_pct=0.25, rotary_emb_base=10000, rope_scaling=None
    )
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "embed_out.weight" in tensors
    masks = {f"gpt_neox.layers.{n}.attention.bias": torch.ones(4, 4).bool() for n in range(2)}
    tables = {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(1)}
    save_file(tensors | masks | tables, file)
    found = open_checkpoint(tmp_path)
    assert found.config == expected.config
    renamed = {n.replace("embed_out", "lm_head"): t for n, t in tensors.items()}
    save_file(renamed, file)
    again = open_checkpoint(tmp_path)
    assert torch.equal(again.tensor("lm_head.weight"), tensors["embed_out.weight"])


def test_rows_of_a_head_lie_together_in_the_joined_matrix(tmp_path: Path) -> None:
    joined = load_file(save_gpt_neox(tmp_path) / "model.safetensors")[
        "gpt_neox.layers.1.attention.query_key_value.weight"
    ]
    checkpoint = open_checkpoint(tmp_path)
    for turn, which in enumerate("qkv"):
        part = checkpoint.tensor(f"layers.2.{which}_proj.weight")
        for head in range(4):
            start = 24 * head + 8 * turn
            assert torch.equal(part[8 * head : 8 * head + 8], joined[start : start + 8])


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_in_both_spellings(where: str, tmp_path: Path) -> None:
    edit_config(save_llama(tmp_path), rope_parameters=..., rope_theta=500000.0)
    edit_config(tmp_path, **{where: LLAMA3})
    scaling = RopeScaling(
        kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=256
    )
    assert rope_of(tmp_path) == RopeConfig(theta=500000.0, dim=8, scaling=scaling)
    edit_config(tmp_path, **{where: {"type": "linear", "factor": 2}})
    assert rope_of(tmp_path).scaling == RopeScaling(kind="linear", factor=2.0)


def test_yarn_stretches_the_context_and_multiplies_what_it_turns(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4}
    plain = open_checkpoint(save_llama(tmp_path))
    edit_config(tmp_path, rope_parameters=yarn)
    found = open_checkpoint(tmp_path)
    assert rope_of(tmp_path).scaling == RopeScaling(kind="yarn", factor=4.0, original_context=512)
    assert found.config.max_context == 2048
    ratio = (1 + 0.07 * math.log(4)) / (1 + 0.04 * math.log(4))
    for name, factor in (("q_proj", ratio), ("k_proj", ratio), ("v_proj", 1.0)):
        expected = plain.tensor(f"layers.0.{name}.weight") * factor
        torch.testing.assert_close(found.tensor(f"layers.0.{name}.weight"), expected)


@pytest.mark.parametrize("save", [partial(save_granite, attention_bias=True), save_gemma3])
def test_factors_are_taken_out_of_what_is_stored_again(
    save: Callable[[Path], Path], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(save(tmp_path))
    stored = as_stored(source_layout(checkpoint), dict(checkpoint.tensors()))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(stored[name], tensor)


def test_llama_heads_wider_than_the_model(tmp_path: Path) -> None:
    config = open_checkpoint(save_llama(tmp_path, head_dim=12, attention_bias=True)).config
    layer = attention_of(config)
    assert (layer.n_heads, layer.n_kv_heads, layer.head_dim) == (4, 2, 12)
    assert layer.qkv_bias and layer.out_bias


@pytest.mark.parametrize(
    ("changes", "window"),
    [({}, 256), ({"sliding_window": None}, None), ({"sliding_window": 4096}, None),
     ({"sliding_window": ..., "max_position_embeddings": 32768}, 4096)],
    ids=["window", "none", "wide", "default"],
)  # fmt: skip
def test_mistrals_window_is_one_where_the_context_is_longer(
    changes: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    edit_config(save_mistral(tmp_path), **changes)
    assert attention_of(open_checkpoint(tmp_path).config).window == window


def test_a_model_of_before_says_nothing_of_what_came_later(tmp_path: Path) -> None:
    """An older runtime, without scaling or MLPs other than SwiGLU, refuses unknown keys."""
    data = open_checkpoint(save_llama(tmp_path / "plain")).config.model_dump(mode="json")
    assert data["layers"][1].keys() == {"kind", "d_intermediate", "bias"}
    assert data["layers"][0]["rope"].keys() == {"theta", "dim"}
    scaled = save_llama(tmp_path / "scaled", rope_parameters=LLAMA3 | {"rope_theta": 1e4})
    for path in (scaled, save_gpt_neox(tmp_path / "neox")):
        config = open_checkpoint(path).config
        assert ModelConfig.model_validate_json(config.model_dump_json()) == config


def test_an_mlp_is_parallel_to_something(tmp_path: Path) -> None:
    mlp = MlpConfig(d_intermediate=8, parallel=True)
    for layers in ((mlp,), (MlpConfig(d_intermediate=8), mlp, mlp)):
        with pytest.raises(ValueError, match="parallel to no layer"):
            ModelConfig(family="test", vocab_size=8, d_model=8, layers=layers)


def test_tensors_of_another_model_are_named(tmp_path: Path) -> None:
    file = save_gpt_neox(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["gpt_neox.layers.0.attention.query_key_value.weight"] = torch.zeros(90, 32)
    del tensors["gpt_neox.layers.1.mlp.dense_4h_to_h.bias"]
    save_file(tensors, file)
    message = str(refusal(tmp_path))
    assert "query_key_value.weight: expected [96, 32], found [90, 32]" in message
    assert "missing (1)" in message and "dense_4h_to_h.bias" in message
