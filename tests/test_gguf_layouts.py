"""GGUF files of OLMo 3, Qwen3.5 with experts and Qwen3-Next: layouts, keys and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import edge
from edge.export.checkpoint import open_checkpoint
from edge.export.exporter import export_checkpoint
from tests.checkpoints import VOCABULARY, refusal
from tests.gguf_files import write_gguf
from tests.test_gguf import CASES
from tests.transformers_checkpoints import save_olmo3


@pytest.fixture(scope="module")
def olmo3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return four blocks of OLMo 3."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    made = tmp_path_factory.mktemp("olmo3")
    return save_olmo3(made, num_hidden_layers=4, layer_types=kinds, sliding_window=5)


@pytest.mark.parametrize(
    ("case", "form"),
    [("qwen3.5-experts", "fused"), ("qwen3-next", "fused"), ("qwen3-next", "legacy")],
)
def test_tensors_that_conversions_join(case: str, form: str, tmp_path: Path) -> None:
    folder = CASES[case](tmp_path / "hf")
    whole = open_checkpoint(folder)
    apart = open_checkpoint(write_gguf(folder, tmp_path / "apart.gguf"))
    joined = open_checkpoint(write_gguf(folder, tmp_path / "joined.gguf", **{form: True}))
    # not whole.config: a file has an fp32 eps, and so a different number
    assert joined.config == apart.config
    for tensor, expected in whole.tensors():
        torch.testing.assert_close(joined.tensor(tensor), expected, rtol=1e-5, atol=1e-6)


SLIDES = "olmo2__attention__sliding_window"
# a file's description of its blocks → which of four see all, or the error
PATTERNS: dict[str, tuple[Any, str]] = {
    "silence": (..., "sss-"),
    "every third": (3, "ss-s"),
    "each": (1, "----"),
    "none": (0, "ssss"),
    "a list": ([False, True, True, False], "-ss-"),
    "a short list": ([True, False], "not 4 times one of"),
    "a text": ("yes", "not 4 times one of"),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_which_blocks_slide(case: str, olmo3: Path, tmp_path: Path) -> None:
    pattern, expected = PATTERNS[case]
    file = write_gguf(olmo3, tmp_path / "x.gguf", **{f"{SLIDES}_pattern": pattern})
    if "not" in expected:
        found = refusal(file)
        assert (
            expected in found.message and found.remedy == "export the original checkpoint instead"
        )
        assert found.field == "olmo2.attention.sliding_window_pattern"
        return
    layers = open_checkpoint(file).config.layers[::2]
    assert "".join("s" if layer.window == 5 else "-" for layer in layers) == expected
    scaled = ["-" if layer.rope.scaling else "s" for layer in layers]
    assert "".join(scaled) == expected, "RoPE is scaled where all is seen"


def test_olmo_by_the_keys_of_other_years(olmo3: Path, tmp_path: Path) -> None:
    now = open_checkpoint(write_gguf(olmo3, tmp_path / "now.gguf")).config
    before = write_gguf(
        olmo3, tmp_path / "before.gguf", olmo2__rope__scaling__attn_factor=1.2,
        olmo2__rope__scaling__yarn_attn_factor=..., olmo2__rope__freq_base_swa=...,
    )  # fmt: skip
    bases = [layer.rope.theta for layer in open_checkpoint(before).config.layers[::2]]
    assert bases == [500.0] * 4 and now.layers[0].rope.theta == 100.0
    assert open_checkpoint(before).config.layers[6] == now.layers[6]
    none = open_checkpoint(write_gguf(olmo3, tmp_path / "none.gguf", **{SLIDES: 0})).config
    assert none.family == "olmo2" and not any(layer.window for layer in none.layers[::2])


@pytest.mark.parametrize("name", ["olmo3", "qwen3.5-experts", "qwen3-next"])
def test_an_engine_gives_what_the_checkpoint_gives(name: str, tmp_path: Path) -> None:
    folder = CASES[name](tmp_path / "hf")
    sources = (folder, write_gguf(folder, tmp_path / "x.gguf"))
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (1, 13))
    found = []
    for number, source in enumerate(sources):
        summary = export_checkpoint(source, tmp_path / str(number), quant="fp32")
        with edge.load(summary.path, engine="ort", threads=1) as model:
            state = model.engine.new_state(window=1, capacity=64)
            found.append(model.engine.run(tokens, state, rows="all", commit=True).copy())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-4 * np.abs(found[0]).max())
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(torch.from_numpy(tokens)).logits
    np.testing.assert_allclose(found[1], expected, atol=1e-4 * float(expected.abs().max()))


# case, changes of the file's metadata → the key at fault, and part of the message
HYBRID_METADATA: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "no experts": (
        "qwen3.5-experts", {"expert_count": ...}, "qwen35moe.expert_count", "is missing"
    ),
    "groups that do not divide": (
        "qwen3.5-experts", {"ssm__group_count": 3}, "qwen35moe.ssm.group_count",
        "does not divide 4 value heads",
    ),
    "gates that are scaled": (
        "qwen3-next", {"expert_weights_scale": 2.5}, "qwen3next.expert_weights_scale",
        "is not a known key",
    ),
    "a text for what is turned": (
        "qwen3.5-experts", {"rope__dimension_count": "2"}, "qwen35moe.rope.dimension_count",
        "is '2', not a whole number",
    ),
    "a list of drafting blocks": (
        "qwen3.5-experts", {"nextn_predict_layers": [1, 2]}, "qwen35moe.nextn_predict_layers",
        "is [1, 2], not a whole number",
    ),
    "no state": ("qwen3-next", {"ssm__state_size": ...}, "qwen3next.ssm.state_size", "is missing"),
    "positions of other axes": (
        "qwen3-next", {"rope__dimension_sections": [1, 1, 1, 0]},
        "qwen3next.rope.dimension_sections", "is not a known key",
    ),
    "a window of text": (
        "olmo3", {"attention__sliding_window": "5"}, "olmo2.attention.sliding_window",
        "not a whole number",
    ),
    "a ramp of YaRN": (
        "olmo3", {"rope__scaling__yarn_ext_factor": 0.5}, "olmo2.rope.scaling.yarn_ext_factor",
        "is not a known key",
    ),
}  # fmt: skip


def test_experts_that_are_not_stacked(tmp_path: Path) -> None:
    folder, more = (
        CASES["mixtral"](tmp_path / "hf"),
        ("blk.0.ffn_up.0.weight", "blk.0.ffn_up.1.weight"),
    )
    found = refusal(write_gguf(folder, tmp_path / "x.gguf", more=more))
    assert found.field == "blk.0.ffn_up.0.weight" and "is one expert's" in found.message
    assert str(found.remedy).startswith("convert the model again")


@pytest.mark.parametrize("case", HYBRID_METADATA)
def test_hybrid_metadata_that_are_refused(case: str, tmp_path: Path) -> None:
    name, changes, field, message = HYBRID_METADATA[case]
    prefix = field.partition(".")[0]
    folder = CASES[name](tmp_path / "hf")
    changed = {f"{prefix}__{key}": value for key, value in changes.items()}
    file = write_gguf(folder, tmp_path / "x.gguf", **changed)
    found = refusal(file)
    assert message in found.message and found.field == field and found.file == str(file)
