"""The reader of MambaInLlama's checkpoints, against transformers and a plain mixer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.export.checkpoint import open_checkpoint
from edge.export.network import Network
from tests.checkpoints import VOCABULARY, edit_config, refusal, write_json
from tests.family_checkpoints import SAVE
from tests.mamba_in_llama import judge, save_mamba_in_llama


@pytest.mark.parametrize(
    ("attention", "mamba2"), [((1,), True), ((), True), ((0, 2), True), ((1,), False)]
)
def test_logits_are_the_judges(attention: tuple[int, ...], mamba2: bool, tmp_path: Path) -> None:
    blocks = {"num_hidden_layers": 3} if 2 in attention else {}
    path = save_mamba_in_llama(tmp_path, attention, mamba2=mamba2, rms_norm_eps=1e-5, **blocks)
    checkpoint = open_checkpoint(path)
    assert checkpoint.family == "mamba_in_llama"
    assert (checkpoint.config.max_context is None) == (not attention)
    network = Network(checkpoint.config).eval()
    network.load_canonical(dict(checkpoint.tensors()))
    tokens = torch.randint(VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = judge(path)(tokens).logits
        found, state = [], None
        for part in tokens.split([1, 33, 3], 1):
            logits, state = network(part, state)
            found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"d_xb": 32}, "d_xb"),
        ({"n_layer": 3}, "n_layer"),
        ({"attn_layers": [2]}, "attn_layers"),
        ({"ssm_cfg": {"expand": 1, "d_state": 5}}, "ssm_cfg.d_state"),
        (
            {"ssm_cfg": {"expand": 1, "repeat_kv_before_conv": False}},
            "ssm_cfg.repeat_kv_before_conv",
        ),
        ({"ssm_cfg": {"ngroups": 2, "d_state": 8}}, "ssm_cfg.ngroups"),
        ({"ssm_cfg": {"ngroups": 4, "d_state": 8, "D_has_hdim": True}}, "ssm_cfg.D_has_hdim"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    path = save_mamba_in_llama(tmp_path)
    file = path / "mamba_config.json"
    write_json(file, json.loads(file.read_text()) | changes)
    problem = refusal(path)
    assert problem.field == field and problem.file == str(file)


@pytest.mark.parametrize("kinds", [("conv", "full_attention"), ("full_attention", "conv")])
def test_of_a_model_without_attention_in_a_block(kinds: tuple[str, str], tmp_path: Path) -> None:
    path = SAVE["lfm2"](tmp_path)
    edit_config(path, layer_types=kinds, num_hidden_layers=2)
    write_json(path / "mamba_config.json", {"attn_layers": []})
    problem = refusal(path)
    assert problem.field == "attn_layers" and "block" in problem.message


def test_of_another_transformer(tmp_path: Path) -> None:
    path = save_mamba_in_llama(tmp_path)
    edit_config(path, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    assert refusal(path).field == "model_type"
