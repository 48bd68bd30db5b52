"""`edge export` with recipes that calibrate: every family, the same every time, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.apps.export import by_kind, describe
from edge.bundle import open_bundle
from edge.errors import ExportError
from edge.export.calibration.texts import checkpoint_reader, read_text
from edge.export.checkpoint import open_checkpoint
from edge.export.exporter import CALIBRATION_FILE, ExportSummary, export_checkpoint
from edge.export.graph import GRAPH_FILE, agreement
from edge.export.graph.verify import verify_graph
from edge.export.judging import poor_line
from edge.export.recipes import names
from edge.plugins.quantize.reference import quantize
from edge.plugins.reference.graph import ReferenceGraph
from edge.runtime.ort import OrtEngine
from tests import checkpoints, transformers_checkpoints
from tests.facts import facts
from tests.test_export_bundle import SAVE

LENGTH = 32
INT8 = [name for name in names() if "a8" in name]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return enough words for a few sequences and held-out tokens."""
    words = " ".join(checkpoints.CORPUS).split()
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(" ".join(rng.choice(words, 1500)))
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: Path(save(folder / family)) for family, save in SAVE.items()}


def export(source: Path, out: Path, quant: str, text: Path, **options: Any) -> ExportSummary:
    return export_checkpoint(
        source, out, quant=quant, calibrate=text, calibrate_sequences=4, calibrate_length=LENGTH,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("family", SAVE)
def test_every_family_runs_in_w8a8(
    family: str, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    summary = export(sources[family], tmp_path / "bundle", "w8a8", text)
    manifest, accuracy = summary.manifest, summary.manifest.accuracy
    engine = accuracy["engine"]
    assert isinstance(engine, dict)
    assert engine["kl_nats_per_token"] <= 1e-4 and engine["top1_agreement"] >= 0.995
    assert accuracy["perplexity"] < 1.1 * accuracy["perplexity_before"]  # type: ignore[operator]
    assert {(name.rpartition(".")[2], kind) for name, kind in manifest.state_dtypes.items()} <= {
        ("conv_state", "int8"), ("key_cache", "float16"), ("value_cache", "float16"),
    }  # fmt: skip
    assert set(manifest.state_dtypes.values()) == (
        {"int8", "float16"} if manifest.model.has_attention else {"int8"}
    )
    with open_bundle(tmp_path / "bundle") as bundle:
        bundle.verify()
        loaded = OrtEngine.from_bundle(bundle, threads=1)
        tokens = np.random.default_rng(0).integers(0, 200, (1, 11))
        state = loaded.new_state(batch=1, window=8, capacity=32)
        whole = loaded.run(tokens[:, :8], state, rows="all").copy()
        state = loaded.new_state(batch=1, window=8, capacity=32)
        steps = [loaded.run(tokens[:, t : t + 1], state, rows="all").copy() for t in range(8)]
        assert np.abs(np.concatenate(steps, 1) - whole).max() <= 1e-3 * np.abs(whole).max()


@pytest.mark.parametrize("family", ["mamba", "bamba"])
@pytest.mark.parametrize("quant", [name for name in INT8 if name != "w8a8"])
def test_every_recipe_makes_a_bundle(
    quant: str, family: str, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    # its scales are found at run time: there is nothing to calibrate
    if quant == "w8a8-dynamic":
        summary = export_checkpoint(sources[family], tmp_path / "bundle", quant=quant)
    else:
        summary = export(sources[family], tmp_path / "bundle", quant, text)
    accuracy = summary.manifest.accuracy
    assert isinstance(accuracy["engine"], dict)
    assert accuracy["engine"]["kl_nats_per_token"] <= 1e-4
    assert summary.manifest.quantization.recipe == quant
    assert summary.notice == poor_line(quant, True, accuracy)
    with open_bundle(tmp_path / "bundle") as bundle:
        bundle.verify()


def test_a_recipe_that_is_poor_for_a_model_is_told_of() -> None:
    figures = {"perplexity_before": 20.0, "perplexity": 21.9}
    told = poor_line("w8a8", True, figures)
    assert (
        told is not None
        and "w8a8 multiplies this model's perplexity by 1.09" in told
        and "w8, w4" in told
    )
    assert "w8, fp16" in str(poor_line("w4", False, figures))
    assert poor_line("w8a8", True, figures | {"perplexity": 20.9}) is None
    assert poor_line("w8a8", True, {"skipped": "too large"}) is None


def test_the_manifest_tells_how_scales_were_found(
    sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    summary = export(sources["mamba"], tmp_path / "bundle", "w8a8", text, percentile=99.0)
    details = summary.manifest.quantization.details
    calibration = details["calibration"]
    assert isinstance(calibration, dict) and details["percentile"] == 99.0
    assert calibration["text"] == "calibration.txt" and len(str(calibration["sha256"])) == 64
    assert calibration["sequences"] == 4 and calibration["length"] == LENGTH
    assert summary.manifest.entry(CALIBRATION_FILE) is not None
    sites = json.loads((tmp_path / "bundle" / CALIBRATION_FILE).read_text())["sites"]
    x = sites["layers.0.conv"]
    assert x["clip"] == "percentile" and 0 < x["clipped"] < 0.02
    assert x["scale"] < x["absmax"] / 127
    assert summary.verdict.startswith("w8a8: ") and "perplexity" in summary.verdict
    assert describe(summary).splitlines()[-1] == summary.verdict


@pytest.mark.parametrize("quant", ["w8a8", "w4a8"])
def test_the_same_checkpoint_and_text_give_the_same_bundle(
    quant: str, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    prints = set()
    for name in ("one", "two"):
        export(sources["mamba2"], tmp_path / name, quant, text, ssm_state=None)
        with open_bundle(tmp_path / name) as bundle:
            prints.add(bundle.fingerprint)
    assert len(prints) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize(("quant", "gptq"), [("w8a8", []), ("w4a8", ["correlating"])])
def test_progress_names_the_stages(
    quant: str, gptq: list[str], sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    seen: list[tuple[str, float]] = []
    export(
        sources["mamba2"], tmp_path / "b", quant, text,
        progress=lambda stage, done: seen.append((stage, done)),
    )  # fmt: skip
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    stages = list(dict.fromkeys(stage for stage, _ in seen))
    assert stages == ["reading", "preparing", "calibrating", *gptq, "weights", "checking",
                      "verifying", "hashing", "done"]  # fmt: skip


def test_calibration_text_makes_four_bits_closer(text: Path, tmp_path: Path) -> None:
    """GPTQ keeps a product's output close, not its weights."""
    source = transformers_checkpoints.save_mamba(tmp_path / "checkpoint", hidden_size=64)
    opened = open_checkpoint(source)
    reader = checkpoint_reader(opened, opened.config)
    tokens = read_text(text, reader, 4, LENGTH).sequences
    costs = []
    for name, given in (("plain", None), ("gptq", text)):
        export_checkpoint(
            source, tmp_path / name, quant="w4", calibrate=given,
            calibrate_sequences=4 if given else None, calibrate_length=LENGTH if given else None,
        )  # fmt: skip
        figures = verify_graph(opened.config, opened, tmp_path / name, tokens, 4)
        costs.append(figures["kl_nats_per_token"])
    assert costs[1] < 0.9 * costs[0]


def test_calibration_that_cannot_be_used_is_refused(
    sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    source, out = sources["mamba"], tmp_path / "b"
    with pytest.raises(ExportError, match="does not calibrate"):
        export(source, out, "fp16", text)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ExportError, match="too few"):
        export(source, out, "w8a8", short)
    short.write_text("")
    with pytest.raises(ExportError, match="holds no text"):
        export(source, out, "w8a8", short)
    short.write_bytes(b"fine until \xff here")
    with pytest.raises(ExportError, match="not UTF-8 at byte 11"):
        export(source, out, "w8a8", short)
    with pytest.raises(ExportError, match="cannot be read"):
        export(source, out, "w8a8", tmp_path / "none.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["short.txt"]


def test_an_engine_that_differs_from_the_references_is_refused(
    sources: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(folder: Path) -> ReferenceGraph:
        """Round y without rotating it."""
        ops = {"HadamardQuantize": lambda x, scale: quantize(x, scale)}
        return ReferenceGraph((folder / GRAPH_FILE).read_bytes(), folder, ops=ops)

    monkeypatch.setattr(agreement, "open_reference", forgetful)
    with pytest.raises(ExportError, match="ONNX Runtime rounds a value"):
        export(sources["mamba2"], tmp_path / "b", "w8a8", text)
    assert list(tmp_path.iterdir()) == []


def test_kinds_of_layers_are_read_from_the_command_line() -> None:
    assert by_kind("attention=fp16, mlp=w8a8-smoothquant") == {
        "attention": "fp16", "mlp": "w8a8-smoothquant",
    }  # fmt: skip
    assert by_kind("") == {}
    for wrong in ("attention", "mlp=", "mlp=w8,mlp=w4"):
        with pytest.raises(ExportError, match=facts("not name", "kind of layer")):
            by_kind(wrong)
