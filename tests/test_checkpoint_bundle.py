"""A floating bundle can replace its checkpoint: the same tensors, text files and logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

from edge.apps.cli import app
from edge.bundle import BundleWriter, open_bundle
from edge.bundle.kernels import DEVICE_GRAPH_FILE, PLAN_FILE
from edge.errors import BundleError, CheckpointError
from edge.export.checkpoint import open_checkpoint
from edge.export.exporter import export_checkpoint
from edge.export.graph import GRAPH_FILE, WEIGHT_FILE
from edge.runtime.engines import open_engine
from edge.runtime.model import resolve
from tests import state_spaces_checkpoints, transformers_checkpoints

ATTENTION = {
    # heads of 6 values, which a graph pads to 8
    "attn_layer_idx": [1], "d_intermediate": 40,
    "attn_cfg": {
        "causal": True, "num_heads": 4, "num_heads_kv": 2, "head_dim": 6, "rotary_emb_dim": 4,
    },
}  # fmt: skip
SAVE: dict[str, Callable[[Path], Path]] = {
    "mamba": lambda path: transformers_checkpoints.save_mamba(
        path, use_conv_bias=False, use_bias=True
    ),
    "mamba2": transformers_checkpoints.save_mamba2,
    "bamba": lambda path: transformers_checkpoints.save_bamba(
        path, attention_bias=True, mlp_bias=True
    ),
    "falcon_h1": transformers_checkpoints.save_falcon_h1,
    "gpt_neox": transformers_checkpoints.save_gpt_neox,
    "jamba": lambda path: transformers_checkpoints.save_jamba(path, num_experts=3),
    "qwen3_5": lambda path: transformers_checkpoints.save_qwen3_5(path, attention_bias=True),
    "zamba2": transformers_checkpoints.save_zamba2,
    "lfm2": lambda path: transformers_checkpoints.save_lfm2(path, conv_bias=True),
    "lfm3": lambda path: transformers_checkpoints.save_lfm3(path, attention_bias=True),
    "padded": lambda path: state_spaces_checkpoints.save_state_spaces(path, 2, **ATTENTION),
    "mambabyte": lambda path: state_spaces_checkpoints.save_mambabyte(path, "layernorm"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """Return (checkpoint, its bundle) by family and recipe."""
    done: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(family: str, quant: str) -> tuple[Path, Path]:
        if (family, quant) not in done:
            folder = tmp_path_factory.mktemp(f"{family}-{quant}")
            source = SAVE[family](folder / "trained")
            (source / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
            (source / "chat_template.jinja").write_text("{{ messages }}")
            values = {"temperature": 0.6, "stop_strings": ["\n\n"], "max_new_tokens": 77}
            (source / "generation_config.json").write_text(json.dumps(values))
            export_checkpoint(source, folder / "bundle", quant=quant, verify=False)
            done[family, quant] = (source, folder / "bundle")
        return done[family, quant]

    return make


def logits(bundle: Path) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, 200, (1, 12))
    with open_bundle(bundle) as opened:
        engine = open_engine(opened, threads=1)
    state = engine.new_state(window=12, capacity=16)
    return engine.run(tokens, state, rows="all").copy()


@pytest.mark.parametrize("family", SAVE)
def test_an_fp32_bundle_holds_the_checkpoints_tensors(family: str, made: Any) -> None:
    source, bundle = made(family, "fp32")
    trained, stored = open_checkpoint(source), open_checkpoint(bundle)
    assert stored.config == trained.config and stored.family == trained.family
    for (name, one), (again, other) in zip(trained.tensors(), stored.tensors(), strict=True):
        assert name == again and stored.dtype(name) == other.dtype == torch.float32
        if name.endswith("A_log"):
            torch.testing.assert_close(other, one, rtol=3e-7, atol=3e-7)
        else:
            assert torch.equal(other, one), name


@pytest.mark.parametrize("family", SAVE)
def test_exported_again_it_is_the_same_model(family: str, made: Any, tmp_path: Path) -> None:
    _, bundle = made(family, "fp32")
    export_checkpoint(bundle, tmp_path / "again")
    one, other = logits(bundle), logits(tmp_path / "again")
    assert np.abs(other - one).max() <= 1e-5 * np.abs(one).max()
    for (_, a), (_, b) in zip(
        open_checkpoint(bundle).tensors(), open_checkpoint(tmp_path / "again").tensors(),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize(
    "family", ["mamba", "bamba", "jamba", "lfm2", "lfm3", "qwen3_5"]
)  # the weights of each mixer
def test_half_floats_stay_as_they_are(family: str, made: Any, tmp_path: Path) -> None:
    _, bundle = made(family, "fp16")
    export_checkpoint(bundle, tmp_path / "again", quant="fp16", verify=False)
    first, second = open_checkpoint(bundle), open_checkpoint(tmp_path / "again")
    assert torch.float16 in {first.dtype(name) for name, _ in first.tensors()}
    for (name, a), (_, b) in zip(first.tensors(), second.tensors(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b) or name.endswith("A_log")


@pytest.mark.parametrize("family", ["mamba2", "mambabyte"])
def test_all_that_is_known_of_text_comes_along(family: str, made: Any, tmp_path: Path) -> None:
    source, bundle = made(family, "fp32")
    with open_bundle(bundle) as opened:
        before, fingerprint = opened.manifest, opened.fingerprint
    export_checkpoint(bundle, tmp_path / "w8", quant="w8", verify=False)
    with open_bundle(tmp_path / "w8") as again:
        after = again.manifest
        for file in ("README.md", "chat_template.jinja"):
            assert again.read(file) == (source / file).read_bytes()
    assert after.tokenizer == before.tokenizer
    assert after.generation == before.generation and after.generation.max_tokens == 77
    assert after.chat_template == before.chat_template
    changed = (GRAPH_FILE, WEIGHT_FILE, PLAN_FILE, DEVICE_GRAPH_FILE)
    texts = {entry for entry in before.files if entry.path not in changed}
    assert texts <= set(after.files)
    # the trained checkpoint, and which bundle of it was quantized
    assert before.provenance.fingerprint == open_checkpoint(source).fingerprint()
    assert after.provenance == before.provenance.model_copy(update={"bundle": fingerprint})
    assert after.provenance.licence == "mit" and after.provenance.source == "trained"


def test_a_bundle_can_be_replaced_by_its_quantized_self(made: Any, tmp_path: Path) -> None:
    bundle = shutil.copytree(made("bamba", "fp32")[1], tmp_path / "bundle")
    export_checkpoint(bundle, bundle, quant="w8", verify=False)
    with open_bundle(bundle) as opened:
        opened.verify()
        assert opened.manifest.quantization.recipe == "w8"


@pytest.mark.parametrize("quant", ["w8", "w4"])
def test_a_quantized_bundle_is_refused(quant: str, made: Any, tmp_path: Path) -> None:
    bundle = shutil.copytree(made("mamba2", quant)[1], tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=f"stored as {quant}") as caught:
        open_checkpoint(bundle)
    assert caught.value.field == "quantization.recipe"
    assert "--quant fp32 or fp16" in str(caught.value.remedy)
    # also a bundle that claims to be floating
    said = json.loads((bundle / "manifest.json").read_text())
    said["quantization"]["recipe"] = "fp32"
    (bundle / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="lacks this weight"):
        open_checkpoint(bundle)


def test_damage_is_found_first(made: Any, tmp_path: Path) -> None:
    bundle = shutil.copytree(made("mamba", "fp32")[1], tmp_path / "bundle")
    with (bundle / WEIGHT_FILE).open("r+b") as stream:
        stream.write(b"\xff")
    with pytest.raises(BundleError, match="SHA-256"):
        open_checkpoint(bundle)
    (bundle / WEIGHT_FILE).unlink()
    with pytest.raises(BundleError, match="missing"):
        open_checkpoint(bundle)


def _drop(graph: onnx.GraphProto) -> None:
    kept = [t for t in graph.initializer if t.name != "layers.0.D"]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _tensor(graph: onnx.GraphProto, name: str = "layers.0.D") -> onnx.TensorProto:
    return next(t for t in graph.initializer if t.name == name)


def _place(graph: onnx.GraphProto, key: str, value: str) -> None:
    next(e for e in _tensor(graph).external_data if e.key == key).value = value


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_drop, r"missing \(1\):\n  layers.0.D"),
        (lambda g: _tensor(g).dims.append(2), r"layers.0.D: expected \[48\], found \[48, 2\]"),
        (lambda g: setattr(_tensor(g), "data_type", 3), "layers.0.D: ONNX type 3"),
        (lambda g: setattr(_tensor(g), "data_type", 99), "layers.0.D: ONNX type 99"),
        (lambda g: _place(g, "offset", "99999999999"), "not a range of weights.bin"),
        (lambda g: _place(g, "offset", "-4"), "not a range of weights.bin"),
        (lambda g: _place(g, "length", "4"), "not a range of weights.bin"),
        (lambda g: _place(g, "location", "manifest.json"), "is stored in another file"),
        (lambda g: _tensor(g).ClearField("data_location"), "not kept in a weight"),
        (lambda g: _tensor(g, "embedding.weight").ClearField("name"), "lacks this weight"),
    ],
)
def test_a_graph_of_other_weights_than_its_models(
    change: Callable[[onnx.GraphProto], None], match: str, made: Any, tmp_path: Path
) -> None:
    """Bundles with correct hashes from an older, foreign or hostile exporter."""
    with open_bundle(made("mamba", "fp32")[1]) as opened, BundleWriter(tmp_path / "b") as writer:
        for entry in opened.manifest.files:
            writer.path(entry.path).write_bytes(opened.read(entry.path))
        model = onnx.load_from_string(opened.read(GRAPH_FILE))
        change(model.graph)
        writer.path(GRAPH_FILE).write_bytes(model.SerializeToString())
        writer.finish(**{k: v for k, v in opened.manifest if k != "files"})
    with pytest.raises(CheckpointError, match=match):
        for _ in open_checkpoint(tmp_path / "b").tensors():
            pass


def test_a_graph_that_is_none(made: Any, tmp_path: Path) -> None:
    with open_bundle(made("mamba", "fp32")[1]) as opened, BundleWriter(tmp_path / "b") as writer:
        for entry in opened.manifest.files:
            writer.path(entry.path).write_bytes(opened.read(entry.path))
        writer.path(GRAPH_FILE).write_bytes(b"\xff" * 100)
        writer.finish(**{k: v for k, v in opened.manifest if k != "files"})
    with pytest.raises(CheckpointError, match="not an ONNX graph"):
        open_checkpoint(tmp_path / "b")


def test_a_rate_that_is_no_logarithm(made: Any, tmp_path: Path) -> None:
    with open_bundle(made("mamba", "fp32")[1]) as opened, BundleWriter(tmp_path / "b") as writer:
        for entry in opened.manifest.files:
            writer.path(entry.path).write_bytes(opened.read(entry.path))
        kept = _tensor(onnx.load_from_string(opened.read(GRAPH_FILE)).graph, "layers.0.A_log")
        offset = next(int(e.value) for e in kept.external_data if e.key == "offset")
        with writer.path(WEIGHT_FILE).open("r+b") as stream:
            stream.seek(offset)
            stream.write(np.float32(1).tobytes())
        writer.finish(**{k: v for k, v in opened.manifest if k != "files"})
    with pytest.raises(CheckpointError, match=r"1 of \d+ values are NaN") as caught:
        open_checkpoint(tmp_path / "b").tensor("layers.0.A_log")
    assert caught.value.field == "layers.0.A_log"


def test_a_demonstration_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", "demo-draft", "-o", str(out), "--quant", "w8"])
    assert result.exit_code == 0, result.output
    with open_bundle(out) as made, open_bundle(resolve("demo-draft")) as shipped:
        assert made.manifest.model == shipped.manifest.model
        assert made.manifest.provenance.source == shipped.manifest.provenance.source
        assert made.manifest.provenance.bundle == shipped.fingerprint
