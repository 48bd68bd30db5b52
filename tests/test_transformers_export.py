"""Transformer families from checkpoint to talk: the engine against transformers, every recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import edge
from edge.apps.chat import app as chat
from edge.apps.cli import app
from edge.bundle import open_bundle
from edge.errors import ContextFullError, ExportError
from edge.export.exporter import export_checkpoint
from edge.export.recipes import names
from edge.runtime.ort import OrtEngine
from tests.checkpoints import CORPUS, save_gpt_neox, save_llama, save_mistral
from tests.test_checkpoint_transformers import LLAMA3
from tests.test_families import in_pieces

Save = Callable[[Path], Path]
SAVE: dict[str, Save] = {
    "gpt_neox": partial(save_gpt_neox, num_attention_heads=2, max_position_embeddings=64),
    "llama": partial(
        save_llama, head_dim=12, max_position_embeddings=2048,
        rope_parameters=LLAMA3 | {"rope_theta": 100.0, "original_max_position_embeddings": 64},
    ),
    "mistral": partial(save_mistral, sliding_window=64),
}  # fmt: skip
CONTEXT = {"gpt_neox": 64, "llama": 2048, "mistral": 64}
LENGTH = 60


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: save(folder / family) for family, save in SAVE.items()}


@pytest.fixture(scope="module")
def bundles(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    for family, source in sources.items():
        summary = export_checkpoint(source, folder / family)
        assert summary.manifest.accuracy["relative_difference"] < 1e-5
        assert summary.unplanned is None, "a GPU runs it too"
    return {family: folder / family for family in sources}


@pytest.mark.parametrize("family", SAVE)
def test_the_engine_gives_transformers_logits(
    family: str, sources: dict[str, Path], bundles: dict[str, Path]
) -> None:
    """In chunks, in steps, and in runs of which a part is taken back, up to the context's end."""
    tokens = np.random.default_rng(0).integers(0, 270, (1, LENGTH))
    theirs = AutoModelForCausalLM.from_pretrained(sources[family], dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    with open_bundle(bundles[family]) as bundle:
        engine = OrtEngine.from_bundle(bundle, threads=1)
    assert engine.config.max_context == CONTEXT[family]
    assert not engine.new_state().layout.recurrent
    difference = np.abs(in_pieces(engine, tokens) - expected).max()
    assert difference < 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = " ".join(CORPUS).split()
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(words, 1000)))
    return path


@pytest.mark.parametrize(
    ("family", "quant"), [*(("gpt_neox", name) for name in names()), ("llama", "w8a8")]
)
def test_every_recipe_applies(
    family: str, quant: str, sources: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    given = {"calibrate": text, "calibrate_sequences": 4, "calibrate_length": 32}
    calibrated = "a8" in quant and quant != "w8a8-dynamic"
    summary = export_checkpoint(
        sources[family], tmp_path / "bundle", quant=quant, **(given if calibrated else {})
    )
    accuracy, manifest = summary.manifest.accuracy, summary.manifest
    assert manifest.quantization.recipe == quant and manifest.state_dtypes == {}
    assert summary.unplanned is None
    if "a8" in quant:
        engine = accuracy["engine"]
        assert isinstance(engine, dict)
        assert engine["kl_nats_per_token"] <= 1e-4 and engine["top1_agreement"] >= 0.99
        stored = {name for name in manifest.quantization.details if name.endswith("matrices")}
        assert "32-bit matrices" not in stored
    assert accuracy["perplexity"] < 1.2 * accuracy["perplexity_before"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("choices", "field"),
    [({"ssm_state": "int8"}, "ssm_state"), ({"groups": True}, "groups"),
     ({"percentile": 99.0}, "percentile")],
)  # fmt: skip
def test_choices_for_mamba_layers_are_refused(
    choices: dict[str, object], field: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ExportError) as refused:
        export_checkpoint(sources["llama"], tmp_path / "bundle", quant="w8a8", **choices)
    assert refused.value.field == field and refused.value.remedy


def test_info_says_what_it_is(bundles: dict[str, Path]) -> None:
    done = CliRunner().invoke(app, ["info", str(bundles["gpt_neox"]), "--context", "64", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["layers"] == {"attention": 2, "mlp": 2}
    assert facts["state_bytes"] == 0
    assert facts["kv_cache_bytes"] == 2 * 2 * 64 * 32 * 4, "2 layers of keys and values"
    done = CliRunner().invoke(app, ["info", str(bundles["gpt_neox"]), "--launches"])
    assert done.exit_code == 0 and "gelu" in done.stdout, done.output


@pytest.mark.parametrize("family", SAVE)
def test_a_session_generates_undoes_and_comes_to_its_contexts_end(
    family: str, bundles: dict[str, Path]
) -> None:
    model = edge.load(bundles[family], threads=1)
    session = model.session(seed=1, capacity=64)
    mark = session.snapshot()
    say = {"temperature": 0, "max_tokens": 9}
    first = session.generate("the state of", **say).finish()
    session.restore(mark)
    again = session.generate("the state of", **say).finish()
    assert again.tokens == first.tokens and len(first.tokens) == 9
    result = session.generate(" the model", temperature=0, max_tokens=200).finish()
    assert result.finish_reason == "context" and len(session.tokens) == 64
    with pytest.raises(ContextFullError, match="do not fit"):
        session.generate(" and more")


def test_chat_talks_to_it(bundles: dict[str, Path]) -> None:
    model = edge.load(bundles["llama"], threads=1)
    expected = model.session().generate("the robot", temperature=0, max_tokens=8).finish()
    arguments = [str(bundles["llama"]), "-p", "the robot", "--temperature", "0",
                 "--max-tokens", "8", "--threads", "1"]  # fmt: skip
    done = CliRunner().invoke(chat, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout == expected.text + "\n"
