"""GGUF files read as checkpoints, against their source checkpoints and transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from typer.testing import CliRunner

import edge
from edge.apps import cli
from edge.errors import CheckpointError
from edge.export.checkpoint import open_checkpoint
from edge.export.exporter import export_checkpoint
from edge.export.network import Network
from tests.checkpoints import VOCABULARY, randomise, refusal
from tests.gguf_files import write_gguf
from tests.transformers_checkpoints import (
    GRANITE,
    save_arcee,
    save_falcon_h1,
    save_falcon_mamba,
    save_gemma,
    save_gemma2,
    save_gemma3,
    save_granite,
    save_granite_hybrid,
    save_jamba,
    save_lfm2,
    save_llama,
    save_mamba,
    save_mamba2,
    save_nemotron_h,
    save_olmo2,
    save_olmo3,
    save_phi3,
    save_qwen2,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_5_moe,
    save_smollm3,
    save_with_experts,
)

Save = Callable[[Path], Path]
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 16.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, Save] = {
    "arcee": save_arcee,
    "llama": save_llama,
    "llama-biases-tied-wide-heads": partial(
        save_llama, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=12,
        num_key_value_heads=1, rms_norm_eps=1e-2,
    ),
    "llama-3": partial(save_llama, head_dim=64, rope_parameters=LLAMA3),
    "mamba": save_mamba,
    "mamba-odd-untied": partial(
        save_mamba, hidden_size=20, state_size=7, conv_kernel=2, time_step_rank=3, expand=3,
        use_bias=True, tie_word_embeddings=False, layer_norm_epsilon=1e-2,
    ),
    "mamba2": save_mamba2,
    "gemma": save_gemma,
    "gemma2": partial(save_gemma2, query_pre_attn_scalar=12),
    "gemma3": partial(
        save_gemma3, num_hidden_layers=6, layer_types=None, query_pre_attn_scalar=12,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        },
    ),
    "olmo2": save_olmo2,
    "olmo3": partial(save_olmo3, sliding_window=5),
    "olmo3-one-base": partial(
        save_olmo3, sliding_window=5,
        rope_parameters={
            f"{kind}_attention": {"rope_type": "default", "rope_theta": 500.0}
            for kind in ("full", "sliding")
        },
    ),
    "phi3": partial(
        save_phi3,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.25, 2.5], "long_factor": [1.0, 4.0, 9.0],
        },
    ),
    "qwen2": save_qwen2,
    "qwen3": partial(save_qwen3, rope_parameters={**YARN}),
    "smollm3": partial(save_smollm3, no_rope_layer_interval=4, num_hidden_layers=4),
    "granite": save_granite,
    "falcon-mamba": save_falcon_mamba,
    "mamba2-one-group-tied": partial(save_mamba2, n_groups=1, tie_word_embeddings=True),
    "falcon-h1": save_falcon_h1,
    "falcon-h1-normed": partial(
        save_falcon_h1, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2,
        mamba_conv_bias=False,
    ),
    "granite-hybrid": save_granite_hybrid,
    "granite-hybrid-turned": partial(
        save_granite_hybrid, position_embedding_type="rope", tie_word_embeddings=False,
        shared_intermediate_size=48,
    ),
    "jamba": save_jamba,
    "jamba-attends-often": partial(save_jamba, attn_layer_period=2, num_hidden_layers=4),
    "nemotron-h": save_nemotron_h,
    "lfm2": save_lfm2,
    "qwen3.5": save_qwen3_5,
    "qwen3.5-a-key-each": partial(
        save_qwen3_5, linear_num_key_heads=4, tie_word_embeddings=True, attention_bias=True
    ),
    "qwen3.5-experts": partial(save_qwen3_5_moe, stacked=False),
    "qwen3-next": partial(
        save_with_experts, family="qwen3_next", shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"], num_hidden_layers=2,
    ),
    "granite-hybrid-experts": partial(
        save_granite_hybrid, num_local_experts=6, num_experts_per_tok=3, intermediate_size=24
    ),
    "jamba-experts": partial(
        save_jamba, num_experts=4, num_experts_per_tok=3, expert_layer_period=2,
        expert_layer_offset=1, num_hidden_layers=4,
    ),
    "nemotron-h-experts": partial(
        save_nemotron_h, n_routed_experts=6, moe_latent_size=16, norm_topk_prob=False,
        moe_intermediate_size=20, moe_shared_expert_intermediate_size=40, num_experts_per_tok=3,
        routed_scaling_factor=1.75, n_group=2, topk_group=1,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    ),
    "lfm2-experts": partial(
        save_with_experts, family="lfm2_moe", num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "qwen3-experts": partial(save_with_experts, family="qwen3_moe", norm_topk_prob=True),
    "qwen2-experts": partial(
        save_with_experts, family="qwen2_moe", shared_expert_intermediate_size=24
    ),
    "mixtral": partial(save_with_experts, family="mixtral"),
    "granite-experts": partial(save_with_experts, family="granitemoe"),
    "granite-experts-shared": partial(
        save_with_experts, family="granitemoeshared", shared_intermediate_size=24, **GRANITE
    ),
}  # fmt: skip
# transformers reads these from GGUF itself
READ_BY_TRANSFORMERS = ("llama", "mamba", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint to convert."""
    return save_llama(tmp_path_factory.mktemp("llama"))


def logits_of(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    network = Network(checkpoint.config).eval()
    network.load_canonical({name: tensor.float() for name, tensor in checkpoint.tensors()})
    with torch.no_grad():
        logits, _ = network(tokens, network.initial_state(1))
    return logits


@pytest.mark.parametrize("name", CASES)
def test_a_conversion_is_undone(name: str, tmp_path: Path) -> None:
    folder = CASES[name](tmp_path / "hf")
    file = write_gguf(folder, tmp_path / "model.gguf")
    whole, converted = open_checkpoint(folder), open_checkpoint(file)
    assert not converted.unknown_fields
    ours, theirs = (c.config.model_dump() for c in (converted, whole))
    if ours["max_context"] == 1 << 20:  # written for models without positions
        theirs["max_context"] = ours["max_context"]
    for made in (ours, theirs):
        layers = made["layers"]
        inner = [layer.pop("inner_eps", None) or 0.0 for layer in layers]
        made["eps"] = [made["norm"].pop("eps"), *inner]
    assert ours.pop("eps") == pytest.approx(theirs.pop("eps"))
    assert ours == theirs
    for tensor, expected in whole.tensors():
        if whole.family == "falcon_h1" and tensor.startswith(("norm_f", "lm_head")):
            continue  # llama.cpp stores the factor of the logits in one, and edge in the other
        torch.testing.assert_close(converted.tensor(tensor), expected, rtol=1e-5, atol=1e-6)
    tokens = torch.randint(0, VOCABULARY, (1, 17), generator=torch.Generator().manual_seed(1))
    judge = AutoModelForCausalLM.from_pretrained(folder)
    if whole.family in READ_BY_TRANSFORMERS:
        # from_pretrained(gguf_file=…) does the same, but needs the package accelerate
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=judge)
        randomise(judge, seed=9)
        absent = judge.load_state_dict(read["tensors"], strict=False)
        assert not absent.unexpected_keys and set(absent.missing_keys) <= {"lm_head.weight"}
        judge.tie_weights()
    with torch.no_grad():
        expected = judge.eval()(tokens).logits
    torch.testing.assert_close(logits_of(file, tokens), expected, rtol=1e-4, atol=1e-4)


def test_blocks_that_only_draft_are_left_out(tmp_path: Path) -> None:
    folder = save_qwen3_5(tmp_path / "hf")
    more = ("blk.3.attn_norm.weight", "blk.3.nextn.eh_proj.weight")
    plain = open_checkpoint(write_gguf(folder, tmp_path / "plain.gguf"))
    drafts = write_gguf(
        folder, tmp_path / "drafts.gguf", more=more,
        qwen35__block_count=4, qwen35__nextn_predict_layers=1,
    )  # fmt: skip
    assert open_checkpoint(drafts).config == plain.config
    with pytest.raises(CheckpointError, match=re.escape("blk.3.attn_norm")):
        open_checkpoint(write_gguf(folder, tmp_path / "unknown.gguf", more=more))


def test_each_quantized_type_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "hf", hidden_size=256, intermediate_size=256, head_dim=64)
    plain = open_checkpoint(folder)
    for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.BF16, Kind.F16):
        found = open_checkpoint(write_gguf(folder, tmp_path / f"{kind.name}.gguf", kind=kind))
        for name in ("layers.1.up_proj.weight", "embedding.weight"):
            values = plain.tensor(name).numpy()
            expected = gguf.dequantize(gguf.quantize(values, kind), kind)
            np.testing.assert_array_equal(found.tensor(name).float().numpy(), expected)
    assert found.dtype("embedding.weight") is torch.float16
    assert found.dtype("norm_f.weight") is torch.float32


@pytest.mark.parametrize(("kind", "block"), [(Kind.Q8_0, 32), (Kind.F16, 128)])
def test_blocks_of_8_bits_are_not_rounded_twice(kind: Kind, block: int, tmp_path: Path) -> None:
    """Weights of a Q8_0 file keep its blocks in `w8`: the embedding's are the file's own."""
    folder = save_llama(tmp_path / "hf", hidden_size=128, intermediate_size=128, head_dim=32)
    file = write_gguf(folder, tmp_path / "x.gguf", kind=kind)
    bundle = export_checkpoint(file, tmp_path / "bundle", quant="w8", verify=False).path
    graph = onnx.load(bundle / "graphs/ort.onnx", load_external_data=False).graph
    sizes = [a.i for node in graph.node for a in node.attribute if a.name == "block_size"]
    assert set(sizes) == {block} and len(sizes) > 8
    stored = {t.name: {e.key: e.value for e in t.external_data} for t in graph.initializer}
    packed, scales = (
        np.frombuffer((bundle / "weights.bin").read_bytes(), dtype, int(place["length"]) // width,
                      int(place["offset"]))
        for name, dtype, width in (("packed", np.uint8, 1), ("scales", np.float32, 4))
        if (place := stored[f"embedding.weight.{name}"])
    )  # fmt: skip
    table = open_checkpoint(file).tensor("embedding.weight").float().numpy()
    ours = (packed.reshape(-1, block).astype(np.float32) - 128) * scales[:, None]
    assert np.array_equal(ours.reshape(table.shape), table) is (kind == Kind.Q8_0)


def test_a_k_quant_of_random_bytes(tmp_path: Path) -> None:
    """Types that only llama.cpp writes: any bytes are a valid tensor."""
    folder = save_llama(tmp_path / "hf", hidden_size=256, intermediate_size=256, head_dim=64)
    for kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL):
        file = write_gguf(folder, tmp_path / "k.gguf")
        reader = gguf.GGUFReader(file)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        bytes_ = np.random.default_rng(0).integers(0, 30, (256, 256 // block * size), np.uint8)
        writer = gguf.GGUFWriter(tmp_path / "k2.gguf", "llama")
        for field in reader.fields.values():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(
                    field.name, field.contents(), field.types[0],
                    field.types[-1] if len(field.types) > 1 else None,
                )  # fmt: skip
        for tensor in reader.tensors:
            if tensor.name == "blk.0.ffn_up.weight":
                writer.add_tensor(tensor.name, bytes_, raw_dtype=kind)
            else:
                writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found = open_checkpoint(tmp_path / "k2.gguf").tensor("layers.1.up_proj.weight")
        np.testing.assert_array_equal(found.numpy(), gguf.dequantize(bytes_, kind))


def test_from_a_file_to_a_conversation(llama: Path, tmp_path: Path) -> None:
    """The bundle of a GGUF file answers like the bundle of its checkpoint."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    file = write_gguf(llama, tmp_path / "tiny.gguf", tokenizer__chat_template=template)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    for source, out in ((llama, "a"), (tmp_path, "b")):
        export_checkpoint(source, tmp_path / out, quant="fp32")
    one, two = (edge.load(tmp_path / out, threads=1) for out in "ab")
    text = "the state of the robot"
    said = [m.session().generate(text, max_tokens=12, temperature=0).finish() for m in (one, two)]
    assert said[0].tokens == said[1].tokens and len(said[0].tokens) == 12
    assert two.manifest.provenance.source == file.name
    assert two.manifest.provenance.licence == "apache-2.0"
    assert (two.path / "README.md").is_file() and two.template is not None
    assert two.tokenizer.eos == (0,) and two.tokenizer.unassigned == ()
    done = CliRunner().invoke(cli.app, ["export", str(file), "-o", str(tmp_path / "c"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["checkpoint_bytes"] == file.stat().st_size


# -- what is refused ---------------------------------------------------------------------------


def test_a_folder_with_several_or_none(llama: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_gguf(llama, tmp_path / f"{name}.gguf")
    assert "holds several GGUF files: a.gguf, b.gguf" in refusal(tmp_path).message
    (tmp_path / "notes.txt").write_text("GGUF")
    assert ".gguf file" in str(refusal(tmp_path / "notes.txt").remedy)


METADATA: dict[str, tuple[dict[str, Any], str, str]] = {
    "another architecture": (
        {"general__architecture": "gemma4"}, "general.architecture", "is 'gemma4'; llama"
    ),
    "a missing key": ({"llama__block_count": ...}, "llama.block_count", "is missing"),
    "two missing": (
        {"llama__block_count": ..., "llama__attention__head_count": ...},
        "llama.block_count", "; llama.attention.head_count: is missing",
    ),
    "experts that are not there": (
        {"llama__expert_count": 8, "llama__expert_used_count": 2}, "",
        "missing (8):\n  blk.0.ffn_gate_inp",
    ),
    "gates by a sigmoid": (
        {"llama__expert_gating_func": 2}, "llama.expert_gating_func", "is not a known key"
    ),
    "attention to what is behind": (
        {"llama__attention__causal": False}, "llama.attention.causal", "is false: tokens see"
    ),
    "a text for a number": (
        {"llama__attention__head_count": "4"}, "llama.attention.head_count", "not a whole number"
    ),
    "too many blocks": ({"llama__block_count": 1 << 31}, "llama.block_count", "outside 1 to"),
    "too few blocks": ({"llama__block_count": 1}, "", "unused (9):\n  blk.1.attn_"),
    "more blocks": ({"llama__block_count": 3}, "", "missing (9):\n  blk.2.attn_norm.weight [32]"),
    "heads of two sizes": (
        {"llama__attention__value_length": 4}, "llama.attention.value_length", "only heads of 8"
    ),
    "longrope": (
        {"llama__rope__scaling__type": "longrope"}, "rope_scaling.rope_type",
        "is 'longrope', which changes with the length",
    ),
    "yarn with a factor of its own": (
        {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__attn_factor": 0.5},
        "llama.rope.scaling.attn_factor", "is not a known key",
    ),
    "a part": ({"split__count": 3}, "split.count", "is one of 3 parts"),
    "an end that is no token": (
        {"tokenizer__ggml__eos_token_id": 4000}, "tokenizer.ggml.eos_token_id", "not one of 272"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_are_refused(case: str, llama: Path, tmp_path: Path) -> None:
    changes, field, message = METADATA[case]
    found = refusal(write_gguf(llama, tmp_path / "x.gguf", **changes))
    assert message in found.message and (found.field or "") == field
