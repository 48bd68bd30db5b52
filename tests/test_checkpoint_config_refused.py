"""Configs that must be refused: always a CheckpointError that says where and what to do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.errors import CheckpointError, ExportError
from edge.export.checkpoint import open_checkpoint
from edge.export.text_files import generation_defaults
from tests.checkpoints import edit_config, refusal, write_json
from tests.facts import says
from tests.state_spaces_checkpoints import save_mambabyte, save_state_spaces
from tests.transformers_checkpoints import (
    save_arcee,
    save_bamba,
    save_falcon_h1,
    save_falcon_mamba,
    save_gemma2,
    save_gemma3,
    save_gpt_neox,
    save_granite,
    save_granite_hybrid,
    save_jamba,
    save_lfm2,
    save_lfm3,
    save_llama,
    save_mamba,
    save_mamba2,
    save_mistral,
    save_nemotron_h,
    save_phi3,
    save_qwen2,
    save_qwen3,
    save_qwen3_5,
    save_smollm3,
    save_zamba,
    save_zamba2,
)

Save = Callable[[Path], Path]
ATTENTION = {"num_heads": 4, "causal": True}
LONGROPE = {"type": "su", "partial_rotary_factor": 0.75, "long_factor": [1.0, 1.0, 1.0]}


def save_hybrid(path: Path) -> Path:
    return save_state_spaces(path, 2, attn_layer_idx=[1], attn_cfg=ATTENTION, d_intermediate=100)


SAVERS: dict[str, Save] = {
    "arcee": save_arcee,
    "mamba": save_mamba,
    "mamba2": save_mamba2,
    "bamba": save_bamba,
    "gpt_neox": save_gpt_neox,
    "llama": save_llama,
    "mistral": save_mistral,
    "falcon_h1": save_falcon_h1,
    "falcon_mamba": save_falcon_mamba,
    "gemma2": save_gemma2,
    "gemma3_text": save_gemma3,
    "granite": save_granite,
    "granitemoehybrid": save_granite_hybrid,
    "jamba": save_jamba,
    "lfm2": save_lfm2,
    "lfm3": save_lfm3,
    "nemotron_h": save_nemotron_h,
    "phi3": save_phi3,
    "qwen2": save_qwen2,
    "qwen3": save_qwen3,
    "qwen3_5": save_qwen3_5,
    "smollm3": save_smollm3,
    "zamba": save_zamba,
    "zamba2": save_zamba2,
    "state-spaces": save_state_spaces,
    "hybrid": save_hybrid,
    "mambabyte": lambda path: save_mambabyte(path, "layernorm"),
}


@pytest.fixture(scope="module", autouse=True)
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one checkpoint of each kind, which must not be written to."""
    return {name: save(tmp_path_factory.mktemp(name)) for name, save in SAVERS.items()}


@pytest.fixture
def path(saved: dict[str, Path], tmp_path: Path) -> Path:
    """Return a Mamba checkpoint to corrupt."""
    return Path(shutil.copytree(saved["mamba"], tmp_path / "mamba"))


def lfm3_rope(**changed: Any) -> dict[str, Any]:
    full = {"rope_type": "proportional", "rope_theta": 200.0, "partial_rotary_factor": 0.5}
    return {"rope_parameters": {"full_attention": full | changed}}


def test_a_missing_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere").message == "does not exist"


def test_a_file_instead_of_a_directory(path: Path) -> None:
    assert "is not a directory" in str(refusal(path / "config.json"))


def test_no_config(path: Path) -> None:
    (path / "config.json").unlink()
    assert says(refusal(path), f"{path}: ", "no config.json", "(give ", "config.json", ".gguf")


DEEP = 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[]", "holds a JSON array"),
        (b"3", "holds a JSON number"),
        (b"null", "holds a JSON null"),
        (b"[" * DEEP + b"]" * DEEP, "nested too deeply"),
        (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "nested too deeply"),
    ],
    ids=["cut", "empty", "bytes", "digits", "array", "number", "null", "deep-list", "deep-object"],
)
def test_a_config_that_is_no_json_object(text: bytes, message: str, path: Path) -> None:
    (path / "config.json").write_bytes(text)
    assert message in str(refusal(path))


def test_a_config_that_is_a_directory(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").mkdir()
    assert "cannot be read" in str(refusal(path))


@pytest.mark.parametrize(
    "change",
    [{"model_type": "gemma4", "architectures": ["Gemma4ForCausalLM"]}, {"model_type": "hymba"},
     {"model_type": ["mamba"]}, {"model_type": ..., "architectures": {"a": 1}}],
    ids=["gemma4", "hymba", "list", "object"],
)  # fmt: skip
def test_an_unknown_architecture_leads_to_the_known_ones(
    change: dict[str, Any], path: Path
) -> None:
    edit_config(path, **change)
    error = refusal(path)
    assert error.field == "model_type"
    assert "docs/use/models.md" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("mamba", {"hidden_size": "24"}, "hidden_size"),
        ("mamba", {"hidden_size": ...}, "hidden_size"),
        ("mamba", {"hidden_size": True}, "hidden_size"),
        ("mamba", {"hidden_size": 24.5}, "hidden_size"),
        ("mamba", {"hidden_size": -1}, "hidden_size"),
        ("mamba", {"vocab_size": 1 << 40}, "vocab_size"),
        ("mamba", {"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ("mamba", {"expand": float("inf")}, "expand"),
        ("mamba", {"expand": 10**400}, "expand"),
        ("mamba", {"expand": 1e300}, "expand"),
        ("mamba", {"expand": 0}, "expand"),
        ("mamba", {"conv_kernel": 1}, "conv_kernel"),
        ("mamba", {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon"),
        ("mamba", {"layer_norm_epsilon": 0}, "layer_norm_epsilon"),
        ("mamba", {"use_bias": "no"}, "use_bias"),
        ("mamba", {"hidden_act": "relu"}, "hidden_act"),
        ("mamba", {"eos_token_id": 10**6}, "eos_token_id"),
        ("mamba", {"eos_token_id": [0, "1"]}, "eos_token_id"),
        ("mamba", {"bos_token_id": -3}, "bos_token_id"),
        ("mamba2", {"num_heads": 5}, "num_heads"),
        ("mamba2", {"n_groups": 3}, None),
        ("mamba2", {"time_step_limit": [1, 0]}, "time_step_limit"),
        ("mamba2", {"time_step_limit": [0, float("nan")]}, "time_step_limit"),
        ("mamba2", {"time_step_limit": {"low": 0}}, "time_step_limit"),
        ("mamba2", {"time_step_limit": [0, 10**400]}, "time_step_limit"),
        ("bamba", {"attn_layer_indices": [7]}, "attn_layer_indices"),
        ("bamba", {"attn_layer_indices": "1"}, "attn_layer_indices"),
        ("bamba", {"num_key_value_heads": 3}, None),
        ("bamba", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type"),
        ("bamba", {"rope_scaling": {"type": "linear"}}, "rope_scaling.type"),
        ("bamba", {"rope_parameters": {"partial_rotary_factor": 0.01}},
         "rope_parameters.partial_rotary_factor"),
        ("bamba", {"rope_parameters": {"partial_rotary_factor": 0.4}},
         "rope_parameters.partial_rotary_factor"),
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act"),
        ("gpt_neox", {"num_attention_heads": 3}, "num_attention_heads"),
        ("gpt_neox", {"rope_parameters": ..., "rotary_pct": 0.4},
         "rope_parameters.partial_rotary_factor"),
        ("gpt_neox", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type"),
        ("gpt_neox", {"head_dim": 8}, "head_dim"),
        ("llama", {"logit_scale": 2.0}, "logit_scale"),
        ("llama", {"sliding_window": 8}, "sliding_window"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"num_key_value_heads": 3}, None),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
         "rope_scaling.low_freq_factor"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "beta_slow": 40}}, "rope_scaling.factor"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": 0}},
         "rope_scaling.attention_factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}},
         "rope_parameters.factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1}},
         "rope_parameters.mscale"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}},
         "rope_parameters.partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_type": ["llama3"]}}, "rope_parameters.rope_type"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"layer_types": ["full_attention"]}, "layer_types"),
        ("falcon_h1", {"ssm_multipliers": [1, 1]}, "ssm_multipliers"),
        ("falcon_h1", {"mlp_multipliers": [1, "2"]}, "mlp_multipliers.1"),
        ("falcon_h1", {"embedding_multiplier": 0}, "embedding_multiplier"),
        ("falcon_h1", {"mamba_n_heads": 7}, "mamba_n_heads"),
        ("falcon_mamba", {"mixer_rms_eps": 0}, "mixer_rms_eps"),
        ("granite", {"logits_scaling": -1.0}, "logits_scaling"),
        ("granitemoehybrid", {"num_local_experts": 2, "num_experts_per_tok": 3},
         "num_experts_per_tok"),
        ("granitemoehybrid", {"layer_types": ["mamba", "moe", "mamba"]}, "layer_types"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ("gemma2", {"attn_logit_softcapping": 1e-320}, "attn_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": 1e-39}, "final_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": 1e-320}, "query_pre_attn_scalar"),
        ("gemma2", {"query_pre_attn_scalar": 1e39}, "query_pre_attn_scalar"),
        ("qwen3_5", {"rms_norm_eps": 5e-324}, "rms_norm_eps"),
        ("llama", {"rope_parameters": {"rope_theta": 1e308}}, "rope_parameters.rope_theta"),
        ("llama", {"rope_parameters": {"rope_theta": 1e-320}}, "rope_parameters.rope_theta"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3_text", {"layer_types": ["full_attention", "conv"]}, "layer_types"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("granitemoehybrid", {"normalization_function": "layernorm"}, "normalization_function"),
        ("jamba", {"num_experts": 4, "expert_layer_offset": 2}, "expert_layer_offset"),
        ("jamba", {"num_experts": 1 << 31}, "n_experts"),
        ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset"),
        ("lfm2", {"layer_types": ["conv"]}, "layer_types"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache"),
        ("lfm3", {"layer_types": ["conv", "mamba", "conv", "conv"]}, "layer_types"),
        ("lfm3", lfm3_rope(rope_theta=0.0), "rope_parameters.full_attention.rope_theta"),
        (
            "lfm3", lfm3_rope(partial_rotary_factor=1.5),
            "rope_parameters.full_attention.partial_rotary_factor",
        ),
        ("lfm3", lfm3_rope(long_factor=[1.0]), "rope_parameters.full_attention.long_factor"),
        (
            "lfm3", lfm3_rope(rope_type="default"),
            "rope_parameters.full_attention.partial_rotary_factor",
        ),
        ("nemotron_h", {"hybrid_override_pattern": "M?-"}, "hybrid_override_pattern"),
        ("nemotron_h", {"hybrid_override_pattern": "MEM", "n_routed_experts": 4, "n_group": 3},
         ""),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("zamba", {"n_mamba_heads": 5}, "n_mamba_heads"),
        ("zamba", {"attention_hidden_size": 16}, "attention_hidden_size"),
        ("zamba", {"hidden_mamba_act": "gelu"}, "hidden_mamba_act"),
        ("zamba2", {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ("zamba2", {"layers_block_type": ...}, "layers_block_type"),
        ("zamba2", {"n_mamba_heads": 5}, "n_mamba_heads"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": [1.0, 2.0]}},
         "rope_scaling.short_factor"),
        ("phi3", {"rope_scaling": LONGROPE | {"short_factor": [1.0, 2.0, 0]}},
         "rope_scaling.short_factor"),
        ("phi3", {"rope_scaling": {"type": "linear"}}, "rope_scaling.type"),
        ("qwen2", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"is_causal": False}, "is_causal"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen3", {"head_dim": "12"}, "head_dim"),
        ("qwen3_5", {"linear_num_key_heads": 3}, "linear_num_key_heads"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("qwen3_5", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("state-spaces", {"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer"),
        ("state-spaces", {"ssm_cfg": {"layer": ["Mamba2"]}}, "ssm_cfg.layer"),
        ("state-spaces", {"ssm_cfg": [1]}, "ssm_cfg"),
        ("state-spaces", {"ssm_cfg": {"d_state": 5, "dt_scale_new": 2}}, "ssm_cfg.dt_scale_new"),
        ("state-spaces", {"attn_layer_idx": [9]}, "attn_layer_idx"),
        ("state-spaces", {"d_intermediate": -1}, "d_intermediate"),
        ("hybrid", {"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "ssm_cfg.D_has_hdim"),
        ("hybrid", {"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}},
         "ssm_cfg.norm_before_gate"),
        ("hybrid", {"ssm_cfg": {"layer": "Mamba2", "d_ssm": 1 << 20}}, "ssm_cfg"),
        ("hybrid", {"attn_cfg": ATTENTION | {"d_conv": 17}}, "attn_cfg.d_conv"),
        ("hybrid", {"attn_cfg": ATTENTION | {"causal": False}}, "attn_cfg.causal"),
        ("hybrid", {"attn_cfg": ATTENTION | {"softmax_scale": 1.0}}, "attn_cfg.softmax_scale"),
        ("hybrid", {"attn_cfg": ATTENTION | {"num_heads": 5}}, "attn_cfg.num_heads"),
        ("hybrid", {"attn_cfg": ATTENTION | {"rotary_emb_interleaved": True}},
         "attn_cfg.rotary_emb_interleaved"),
        ("hybrid", {"attn_cfg": ...}, "attn_cfg.causal"),
        ("mambabyte", {"vocab_size": 300}, "vocab_size"),
        ("mambabyte", {"num_layers": 2.0}, "num_layers"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_field_is_named(
    kind: str, change: dict[str, Any], field: str | None, saved: dict[str, Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(saved[kind], tmp_path / kind))
    (directory / "generation_config.json").unlink(missing_ok=True)
    edit_config(directory, **change)
    error = refusal(directory)
    assert error.file == str(directory / "config.json")
    assert field is None or (error.field or "").endswith(field), str(error)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mamba", {"hidden_size": "24", "conv_kernel": 1, "use_bias": "no", "hidden_act": "relu",
                   "vocab_size": 0, "layer_norm_epsilon": 2}),
        ("bamba", {"attn_layer_indices": [9], "mamba_d_state": 0, "vocab_size": ...,
                   "intermediate_size": []}),
        ("llama", {"logit_scale": 2.0, "mscale": 1, "quantization_config": {"bits": 4}}),
        ("mambabyte", {"num_layers": 2.0, "rms_norm": 1, "d_state": -1}),
    ],
    ids=str,
)  # fmt: skip
def test_every_bad_field_is_named_at_once(
    kind: str, changes: dict[str, Any], saved: dict[str, Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(saved[kind], tmp_path / kind))
    edit_config(directory, **changes)
    text = str(refusal(directory))
    assert all(f"{field}: " in text for field in changes), text
    assert text.count(";") >= len(changes) - 1


def test_a_size_that_does_not_fit_is_no_fault_where_another_is_wrong(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(saved["mamba2"], tmp_path / "mamba2"))
    edit_config(directory, head_dim="8")
    assert str(refusal(directory)).count(": is ") == 1
    edit_config(directory, head_dim=8, num_heads=5)
    assert "5 heads of 8 do not make" in str(refusal(directory))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_value_of_any_field_makes_another_error(
    data: st.DataObject, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = saved[data.draw(st.sampled_from(sorted(saved)))]
    values = json.loads((source / "config.json").read_text())
    target = values
    name = data.draw(st.sampled_from(sorted(values)))
    if isinstance(values[name], dict) and values[name] and data.draw(st.booleans()):
        target = values[name]
        name = data.draw(st.sampled_from(sorted(target)))
    target[name] = data.draw(JUNK)
    directory = tmp_path_factory.mktemp("junk")
    for file in source.iterdir():
        os.link(file, directory / file.name)
    (directory / "config.json").unlink()
    write_json(directory / "config.json", values)
    try:
        open_checkpoint(directory)
    except CheckpointError as error:
        assert error.file is not None and error.remedy


def test_a_bad_generation_config(path: Path) -> None:
    (path / "generation_config.json").write_text("[]")
    assert refusal(path).file == str(path / "generation_config.json")
    write_json(path / "generation_config.json", {"eos_token_id": "end"})
    assert refusal(path).field == "eos_token_id"


def test_all_bad_defaults_of_a_generation_config(path: Path) -> None:
    file = path / "generation_config.json"
    write_json(file, {"top_k": "8", "top_p": 2, "max_new_tokens": True, "stop_strings": 3})
    with pytest.raises(ExportError) as caught:
        generation_defaults(open_checkpoint(path))
    assert caught.value.file == str(file) and caught.value.remedy
    assert caught.value.field == "top_k"
    assert all(name in caught.value.message for name in ("top_p", "max_new_tokens", "stop_strings"))
    write_json(file, {"top_k": 8, "temperature": 1, "stop_strings": "###"})
    found = generation_defaults(open_checkpoint(path))
    assert (found.top_k, found.temperature, found.stop) == (8, 1.0, ("###",))
