"""A checkpoint folder becomes a bundle: complete, hashed, verified, the same every time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge.bundle import open_bundle
from edge.errors import CheckpointError, ExportError
from edge.export import judging
from edge.export.calibration.texts import GREETINGS
from edge.export.checkpoint import open_checkpoint
from edge.export.exporter import export_checkpoint
from edge.export.graph import GRAPH_FILE, WEIGHT_FILE
from edge.export.graph import verify as verification
from edge.export.network import Network
from edge.runtime.ort import OrtEngine
from edge.text import load_template, load_tokenizer
from tests import state_spaces_checkpoints, transformers_checkpoints
from tests.facts import facts

SAVE: dict[str, Any] = {
    "mamba": transformers_checkpoints.save_mamba,
    "mamba2": transformers_checkpoints.save_mamba2,
    "bamba": transformers_checkpoints.save_bamba,
    "mambabyte": state_spaces_checkpoints.save_mambabyte,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(SAVE["mamba2"](tmp_path_factory.mktemp("checkpoint") / "tiny"))


@pytest.mark.parametrize("family", SAVE)
def test_the_runtime_gives_the_networks_logits(family: str, tmp_path: Path) -> None:
    source = SAVE[family](tmp_path / "checkpoint")
    summary = export_checkpoint(source, tmp_path / "bundle")
    opened = open_checkpoint(source)
    net = Network(opened.config).eval()
    net.load_canonical({n: t.float() for n, t in opened.tensors()})
    tokens = np.random.default_rng(0).integers(0, 200, (1, 11))
    with torch.no_grad():
        expected = net(torch.from_numpy(tokens))[0].numpy()
    with open_bundle(tmp_path / "bundle") as bundle:
        bundle.verify()
        engine = OrtEngine.from_bundle(bundle, threads=1)
        state = engine.new_state(batch=1, window=8, capacity=32)
        found = [engine.run(tokens[:, :8], state, rows="all").copy(),
                 engine.run(tokens[:, 8:], state, rows="all").copy()]  # fmt: skip
        assert np.abs(np.concatenate(found, 1) - expected).max() < 1e-4 * np.abs(expected).max()
        tokenizer = load_tokenizer(bundle)
        assert tokenizer.decode(tokenizer.encode("the robot walks")) == "the robot walks"
    assert summary.manifest.accuracy["relative_difference"] < 1e-4
    assert summary.manifest.accuracy["top1_agreement"] == 1.0
    assert summary.parameters == sum(p.numel() for p in net.parameters())
    assert "KL" in summary.accuracy and summary.verdict.startswith("fp32: ")
    assert json.loads(json.dumps(summary.to_dict()))["parameters"] == summary.parameters


@pytest.mark.parametrize("quant", ["fp32", "w4"])
def test_the_same_checkpoint_gives_the_same_bundle(
    quant: str, checkpoint: Path, tmp_path: Path
) -> None:
    prints = set()
    for name in ("one", "two"):
        export_checkpoint(checkpoint, tmp_path / name, quant=quant)
        with open_bundle(tmp_path / name) as bundle:
            bundle.verify()
            prints.add(bundle.fingerprint)
    assert len(prints) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


def test_recipes_shrink_the_bundle_and_are_recorded(checkpoint: Path, tmp_path: Path) -> None:
    sizes = []
    for quant in ("fp32", "fp16", "w8", "w4"):
        manifest = export_checkpoint(checkpoint, tmp_path / quant, quant=quant).manifest
        entry = manifest.entry(WEIGHT_FILE)
        assert entry is not None and manifest.quantization.recipe == quant
        assert manifest.accuracy["kl_nats_per_token"] >= 0
        sizes.append(entry.size)
        stored = manifest.quantization.details
        assert stored.get(f"{manifest.quantization.bits}-bit matrices", 0) != 0
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 3


def test_progress_rises_to_one(checkpoint: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    export_checkpoint(
        checkpoint, tmp_path / "b", progress=lambda stage, done: seen.append((stage, done))
    )
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert {"reading", "weights", "verifying"} <= {stage for stage, _ in seen}


def test_verifying_says_how_far_it_is(checkpoint: Path, tmp_path: Path) -> None:
    seen: list[float] = []

    def note(stage: str, done: float) -> None:
        if stage == "verifying":
            seen.append(done)

    export_checkpoint(checkpoint, tmp_path / "b", quant="w8a8", progress=note)
    assert seen == sorted(seen) and seen[0] == 0.75 and seen[-1] == pytest.approx(0.97)
    # the longest step, here of few layers and runs, was a seventh of the export
    assert max(b - a for a, b in itertools.pairwise(seen)) < 0.03


def test_verification_can_be_left_out_and_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = export_checkpoint(checkpoint, tmp_path / "off", verify=False)
    assert off.manifest.accuracy == {"skipped": "verification was switched off"}
    monkeypatch.setattr(judging, "VERIFY_LIMIT", 1000)
    large = export_checkpoint(checkpoint, tmp_path / "large")
    assert "more than" in str(large.manifest.accuracy["skipped"])
    assert large.accuracy.startswith("not measured")
    assert large.verdict.endswith("perplexity not measured")


def test_a_graph_that_differs_is_refused_and_nothing_is_left(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = verification.reference_logits

    def wrong(*args: Any) -> Any:
        logits = right(*args)
        logits[0, 5] *= 1.01
        return logits

    monkeypatch.setattr(verification, "reference_logits", wrong)
    with pytest.raises(ExportError, match="differs from the network"):
        export_checkpoint(checkpoint, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_the_reference_holds_one_layer_at_a_time_and_is_the_network(checkpoint: Path) -> None:
    opened = open_checkpoint(checkpoint)
    net = Network(opened.config).eval()
    net.load_canonical({n: t.float() for n, t in opened.tensors()})
    tokens = np.random.default_rng(1).integers(0, 200, (1, 70))
    with torch.no_grad():
        expected = net(torch.from_numpy(tokens))[0].numpy()
    streamed = verification.reference_logits(opened.config, opened, tokens)
    assert np.abs(streamed - expected).max() < 1e-5 * np.abs(expected).max()


def test_chat_template_and_defaults_come_along(tmp_path: Path) -> None:
    source = SAVE["mamba2"](tmp_path / "checkpoint")
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    values = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 99,
              "stop_strings": ["\n\n"], "eos_token_id": 0}  # fmt: skip
    (source / "generation_config.json").write_text(json.dumps(values))
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Model\n")
    export_checkpoint(source, tmp_path / "bundle", verify=False)
    with open_bundle(tmp_path / "bundle") as bundle:
        manifest = bundle.manifest
        template = load_template(bundle, load_tokenizer(bundle))
        assert template is not None
    assert manifest.chat_template == "chat_template.jinja"
    assert manifest.generation.temperature == 0.7 and manifest.generation.max_tokens == 99
    assert manifest.generation.stop == ("\n\n",) and manifest.tokenizer.eos == (0,)
    assert manifest.provenance.licence == "apache-2.0"
    assert manifest.provenance.source == "checkpoint"
    with open_bundle(tmp_path / "bundle") as bundle:
        assert bundle.read("README.md").endswith(b"# Model\n")


def test_greedy_models_default_to_temperature_zero(tmp_path: Path) -> None:
    source = SAVE["mamba2"](tmp_path / "checkpoint")
    (source / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7}')
    manifest = export_checkpoint(source, tmp_path / "bundle", verify=False).manifest
    assert manifest.generation.temperature == 0.0


def test_all_that_an_export_writes_is_in_the_folder_that_the_next_one_clears(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Including the fp32 model for finding scales, which a killed export used to leave behind."""
    seen: dict[str, set[str]] = {}

    def look(stage: str, share: float) -> None:
        seen.setdefault(stage, set()).update(path.name for path in tmp_path.iterdir())

    export_checkpoint(
        checkpoint, tmp_path / "bundle", quant="w8a8", verify=False, progress=look,
        calibrate_sequences=1, calibrate_length=8,
    )  # fmt: skip
    during = seen["calibrating"]
    assert len(during) == 1 and during.pop().startswith(".bundle.exporting-")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert not list((tmp_path / "bundle").glob(".*"))


def test_what_cannot_become_a_bundle_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="choose one of"):
        export_checkpoint(checkpoint, tmp_path / "b", quant="w3")
    with pytest.raises(CheckpointError, match="none: does not exist"):
        export_checkpoint(tmp_path / "none", tmp_path / "b")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(ExportError, match="not a bundle"):
        export_checkpoint(checkpoint, tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
    bare = SAVE["mamba2"](tmp_path / "bare", vocab_size=200)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match="has no tokenizer"):
        export_checkpoint(bare, tmp_path / "b")
    (bare / "tokenizer.json").write_text("{}")
    with pytest.raises(ExportError, match=facts("cannot be read", "tokenizer")):
        export_checkpoint(bare, tmp_path / "b")
    (bare / "tokenizer_config.json").write_text("[" * 10**5)
    with pytest.raises(ExportError, match="cannot be read as JSON"):
        export_checkpoint(bare, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_checkpoint_without_a_tokenizer_is_refused_unless_one_is_named(tmp_path: Path) -> None:
    bare = transformers_checkpoints.save_mamba(tmp_path / "bare", vocab_size=300)
    (bare / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(ExportError, match="--tokenizer bytes"):
        export_checkpoint(bare, tmp_path / "b", verify=False)
    summary = export_checkpoint(bare, tmp_path / "b", verify=False, tokenizer="bytes")
    assert summary.manifest.tokenizer.kind == "bytes" and summary.notice is None
    named = export_checkpoint(bare, tmp_path / "b", tokenizer=tmp_path / "tokenizer.json")
    assert named.manifest.tokenizer.kind == "tokenizer.json" and named.notice is None
    assert named.manifest.accuracy["on"] == "text"
    with pytest.raises(ExportError, match=r"no tokenizer\.json"):
        export_checkpoint(bare, tmp_path / "b", tokenizer=tmp_path / "bare")


def test_an_older_bundle_is_replaced(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "b", quant="fp32", verify=False)
    export_checkpoint(checkpoint, tmp_path / "b", quant="w8", verify=False)
    with open_bundle(tmp_path / "b") as bundle:
        bundle.verify()
        assert bundle.manifest.quantization.recipe == "w8"
        assert bundle.manifest.entry(GRAPH_FILE) is not None


def test_the_text_of_the_package_is_named_and_does_not_judge(
    checkpoint: Path, tmp_path: Path
) -> None:
    few: Any = {"quant": "w8a8", "calibrate_sequences": 32, "calibrate_length": 128}
    plain = export_checkpoint(checkpoint, tmp_path / "plain", **few)
    given = export_checkpoint(checkpoint, tmp_path / "given", calibrate=GREETINGS, **few)
    assert "calibrated on the greetings" in (plain.notice or "")
    assert "calibrated" not in (given.notice or "")
    read = [open_bundle(made.path).manifest.accuracy["on"] for made in (plain, given)]
    assert "held-out" not in read[0] and "held-out" in read[1]
