"""Each family from checkpoint to engine: the logits of ONNX Runtime and of the CPU are
transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import edge
from edge.apps.chat import app as chat
from edge.apps.cli import app
from edge.errors import ContextFullError, ExportError
from edge.export.checkpoint import open_checkpoint
from edge.export.exporter import ExportSummary, export_checkpoint
from edge.export.network import Network
from edge.plugins.cpu import library
from tests.checkpoints import CORPUS
from tests.family_checkpoints import SAVE
from tests.mamba_in_llama import judge
from tests.state_spaces_checkpoints import save_state_spaces

# families that transformers has no class for
APART = ("mambabyte", "mistral_mamba")
# one family for every kind of layer that a recipe treats
ROUNDED = ("jamba", "lfm2", "lfm3", "nemotron_h", "qwen3")
# whose layers are those of other families, after a wider norm
APPLIED = [
    *product(("falcon_h1", "qwen3_5"), ("w4", "w8a8", "w4a8")),
    *product(ROUNDED, ("w4", "w8a8")),
    *product(("gpt_neox",), ("fp32", "fp16", "w8", "w8a8", "w4a16", "w8a8-dynamic")),
    ("llama", "w8a8"),
    ("qwen2_moe", "w8a8"),
    ("zamba2", "w4"),
    ("zamba2", "w8a8"),
    # whose B and C belong to groups
    ("mamba_in_llama", "w4a8"),
    ("zamba", "w8a8"),
]
# of Transformers, which have no other state
CONTEXT = {
    "gemma2": 64, "gemma3_text": 64, "gpt_neox": 64, "llama": 2048, "mistral": 64,
    "olmo3": 256, "phi3": 1024,
}  # fmt: skip
LENGTH = 60
ENGINES = ("ort", *(["cpu"] if library.path() is not None else []))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: SAVE[family](folder / family))


@pytest.fixture(scope="module")
def exported(
    source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], ExportSummary]:
    folder = tmp_path_factory.mktemp("bundles")
    return cache(lambda family: export_checkpoint(source(family), folder / family))


@pytest.mark.parametrize("family", [name for name in SAVE if name not in APART])
def test_the_engines_give_transformers_logits(
    family: str, source: Callable[[str], Path], exported: Callable[[str], ExportSummary]
) -> None:
    """In a chunk, in steps, and in runs that are partly rewound."""
    summary = exported(family)
    assert summary.manifest.accuracy["relative_difference"] < 1e-4
    assert summary.manifest.model.family == family and summary.notice is None
    assert summary.unplanned is None and summary.unbuildable is None
    tokens = np.random.default_rng(0).integers(0, 270, (1, LENGTH))
    if family in CONTEXT:
        assert summary.manifest.model.max_context == CONTEXT[family]
        assert not any(layer.recurrent for layer in summary.manifest.model.layers)
    if family == "mamba_in_llama":
        theirs = judge(source(family))
    else:
        theirs = AutoModelForCausalLM.from_pretrained(source(family), dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    for engine in ENGINES:
        with edge.load(summary.path, engine=engine, threads=1) as model:
            found = in_pieces(model.engine, tokens)
        difference = np.abs(found - expected).max()
        assert difference < 1e-4 * np.abs(expected).max(), engine


def test_attention_behind_a_convolution_runs_on_the_engines(tmp_path: Path) -> None:
    """For state-spaces' hybrids: transformers has none, and the network is tested elsewhere."""
    attention = {"num_heads": 4, "num_heads_kv": 2, "causal": True, "rotary_emb_dim": 4}
    source = save_state_spaces(
        tmp_path / "checkpoint", 2, attn_layer_idx=[1], attn_cfg=attention | {"d_conv": 4}
    )
    summary = export_checkpoint(source, tmp_path / "bundle")
    assert summary.manifest.accuracy["relative_difference"] < 1e-4
    assert summary.unplanned is None and summary.unbuildable is None
    tokens = np.random.default_rng(0).integers(0, 270, (1, LENGTH))
    found = []
    for engine in ENGINES:
        with edge.load(tmp_path / "bundle", engine=engine, threads=1) as model:
            found.append(in_pieces(model.engine, tokens))
    checkpoint = open_checkpoint(source)
    network = Network(checkpoint.config).eval()
    network.load_canonical(dict(checkpoint.tensors()))
    with torch.no_grad():
        expected = network(torch.from_numpy(tokens))[0].numpy()
    for logits in found:
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def in_pieces(engine: edge.runtime.engine.Engine, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of a chunk, of steps, and of runs that are partly rewound."""
    state, half = engine.new_state(window=5, capacity=64), tokens.shape[1] // 2
    found = [engine.run(tokens[:, :half], state, rows="all", commit=True).copy()]
    for past in range(half, half + 4):
        found.append(engine.run(tokens[:, past : past + 1], state, rows="all").copy())
    while state.position < tokens.shape[1]:
        past = state.position
        drafted = tokens[:, past : past + 5].copy()
        drafted[:, 3:] = (drafted[:, 3:] + 1) % 270
        logits = engine.run(drafted, state, rows="all")
        kept = min(3, tokens.shape[1] - past)
        found.append(logits[:, :kept].copy())
        state.rewind(drafted.shape[1] - kept)
    return np.concatenate(found, 1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = " ".join(CORPUS).split()
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(words, 1000)))
    return path


@pytest.mark.parametrize(("family", "quant"), APPLIED)
def test_every_recipe_applies(
    family: str, quant: str, source: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    given = {"calibrate": text, "calibrate_sequences": 4, "calibrate_length": 32}
    integers = "a8" in quant
    calibrated = integers and quant != "w8a8-dynamic"
    summary = export_checkpoint(
        source(family), tmp_path / "bundle", quant=quant, **(given if calibrated else {})
    )
    accuracy = summary.manifest.accuracy
    assert summary.unplanned is None and summary.unbuildable is None
    if integers:
        engine = accuracy["engine"]
        assert isinstance(engine, dict)
        assert engine["kl_nats_per_token"] <= 1e-4 and engine["top1_agreement"] >= 0.99
    if family in CONTEXT:
        caches = set() if quant == "fp32" else {"float16"}
        assert set(summary.manifest.state_dtypes.values()) == caches
        assert not integers or "32-bit matrices" not in summary.manifest.quantization.details
    assert accuracy["perplexity"] < 1.3 * accuracy["perplexity_before"]  # type: ignore[operator]
    if "cpu" in ENGINES:
        tokens = np.random.default_rng(1).integers(0, 270, (1, LENGTH))
        found = []
        for engine_name in ENGINES:
            with edge.load(tmp_path / "bundle", engine=engine_name, threads=1) as model:
                found.append(in_pieces(model.engine, tokens))
        spread = np.abs(found[0]).max()
        # products with 4-bit weights round their input on one engine and not on the other
        assert np.abs(found[1] - found[0]).mean() < 0.02 * spread


@pytest.mark.parametrize(
    ("choices", "field"),
    [({"ssm_state": "int8"}, "ssm_state"), ({"groups": True}, "groups"),
     ({"percentile": 99.0}, "percentile")],
)  # fmt: skip
def test_choices_for_mamba_layers_are_refused(
    choices: dict[str, object], field: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ExportError) as refused:
        export_checkpoint(source("llama"), tmp_path / "bundle", quant="w8a8", **choices)
    assert refused.value.field == field and refused.value.remedy


def test_info_says_what_it_is(exported: Callable[[str], ExportSummary]) -> None:
    bundle = str(exported("gpt_neox").path)
    done = CliRunner().invoke(app, ["info", bundle, "--context", "64", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["layers"] == {"attention": 2, "mlp": 2}
    assert facts["state_bytes"] == 0
    assert facts["kv_cache_bytes"] == 2 * 2 * 64 * 32 * 4, "2 layers of keys and values"
    done = CliRunner().invoke(app, ["info", bundle, "--launches"])
    assert done.exit_code == 0 and "gelu" in done.stdout, done.output


@pytest.mark.parametrize("family", CONTEXT)
def test_a_session_generates_undoes_and_comes_to_its_contexts_end(
    family: str, exported: Callable[[str], ExportSummary]
) -> None:
    model = edge.load(exported(family).path, threads=1)
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


def test_chat_talks_to_it(exported: Callable[[str], ExportSummary]) -> None:
    bundle = exported("llama").path
    model = edge.load(bundle, threads=1)
    expected = model.session().generate("the robot", temperature=0, max_tokens=8).finish()
    arguments = [str(bundle), "-p", "the robot", "--temperature", "0",
                 "--max-tokens", "8", "--threads", "1"]  # fmt: skip
    done = CliRunner().invoke(chat, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout == expected.text + "\n"
