"""Models with windows, exported and run on the `cpu` engine, against transformers; the plans'
statements on their caches; and state files between engines with whole and sliding caches.
"""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import edge
from edge.apps.info import collect, describe
from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.errors import BundleError
from edge.export.exporter import export_checkpoint
from edge.launch_checks import check_plan
from edge.plugins.cpu import library
from edge.runtime.cpu import planning
from edge.runtime.model import Model
from tests import libedge
from tests.transformers_checkpoints import save_gemma2, save_gemma3, save_mistral, save_olmo3

pytestmark = pytest.mark.skipif(library.path() is None, reason="needs the kernels for CPUs")
ROOT = tempfile.TemporaryDirectory(prefix="edge-sliding-")
WINDOW, CHUNK, CAPACITY = 11, 16, 200
KINDS = {
    "gemma3": partial(save_gemma3, sliding_window=WINDOW),
    "gemma2": partial(save_gemma2, sliding_window=WINDOW),
    "olmo3": partial(save_olmo3, sliding_window=WINDOW),
    # every layer
    "mistral": partial(save_mistral, sliding_window=WINDOW),
}


@cache
def bundle(kind: str) -> Path:
    source, out = Path(ROOT.name) / f"{kind}-source", Path(ROOT.name) / kind
    KINDS[kind](source, max_position_embeddings=256)
    export_checkpoint(source, out, quant="fp32", verify=False, chunk=CHUNK)
    return out


@cache
def model(kind: str, engine: str) -> Model:
    return edge.load(bundle(kind), engine=engine, threads=1)


def theirs(kind: str, ids: np.ndarray) -> np.ndarray:
    judge: Any = AutoModelForCausalLM.from_pretrained(
        Path(ROOT.name) / f"{kind}-source", dtype=torch.float32
    )
    with torch.no_grad():
        return np.asarray(judge(torch.from_numpy(ids)).logits[0].float().numpy())


def text(kind: str, count: int) -> np.ndarray:
    vocab = model(kind, "cpu").engine.config.vocab_size
    return np.random.default_rng(3).integers(0, vocab, (1, count))


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_logits_far_past_the_window(kind: str) -> None:
    engine = model(kind, "cpu").engine
    ids = text(kind, 173)
    state = engine.new_state(window=3, capacity=CAPACITY)
    assert state.layout.slots is not None and state.layout.slots < CAPACITY // 3
    rows, at = [], 0
    while at < ids.shape[1]:  # chunks, then runs that are rewound, then steps
        count = (CHUNK, 5, 1, 1, 1, 3)[len(rows) % 6]
        part = ids[:, at : at + count]
        if count == 3:
            engine.run(part[:, ::-1], state)
            state.rewind(part.shape[1])
        rows.append(engine.run(part, state, rows="all", commit=count > 3)[0].copy())
        at += count
    expected = theirs(kind, ids)
    found = np.concatenate(rows)[:, : expected.shape[1]]
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert state.ledger.first > 3 * WINDOW


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_a_state_goes_from_engine_to_engine(kind: str, tmp_path: Path) -> None:
    """By file and by copy, though one keeps all rows and one only the last; libedge too."""
    slid, whole = (model(kind, name).engine for name in ("cpu", "ort"))
    ids = text(kind, 120)
    files = {}
    for name, engine in {"cpu": slid, "ort": whole}.items():
        state = engine.new_state(capacity=CAPACITY)
        for start in range(0, 96, CHUNK):
            engine.run(ids[:, start : start + CHUNK], state, commit=True)
        engine.run(ids[:, 96:98], state)
        files[name] = tmp_path / name
        state.save(files[name])
    assert files["cpu"].stat().st_size < files["ort"].stat().st_size
    expected = theirs(kind, ids)[98:]
    for file in files.values():
        for engine in (slid, whole):
            state = engine.new_state(capacity=CAPACITY)
            engine.run(ids[:, 5:16], state, commit=True)
            state.load(file)
            found = engine.run(ids[:, 98:106], state, rows="all")[0].copy()
            other = (whole if engine is slid else slid).new_state(capacity=CAPACITY)
            other.restore(state.snapshot(applied=True))
            rest = other.workspace.engine.run(ids[:, 106:120], other, rows="all", commit=True)[0]
            both = np.concatenate([found, rest])[:, : expected.shape[1]]
            assert np.abs(both - expected).max() <= 1e-4 * np.abs(expected).max()
        there = libedge.CModel(bundle(kind)).session(window=8, capacity=CAPACITY)
        there.load(file)
        there.save(tmp_path / "c")
        back = slid.new_state(capacity=CAPACITY)
        back.load(tmp_path / "c")
        found = slid.run(ids[:, 98:106], back, rows="all")[0][:, : expected.shape[1]]
        assert np.abs(found - expected[:8]).max() <= 1e-4 * np.abs(expected).max()


def test_plans_count_what_does_not_grow() -> None:
    with open_bundle(bundle("gemma3")) as opened:
        manifest, plan = opened.manifest, open_plan(opened)
        facts = collect(opened, context=CAPACITY)
    plans = [planning.plan_bundle(manifest, plan, capacity=n) for n in (100, 200)]
    engine = model("gemma3", "cpu").engine
    layout = engine.new_state(capacity=200).layout
    assert plans[1]["kv_cache"] >= layout.cache_bytes == facts["kv_cache_sliding_bytes"]
    assert facts["kv_cache_sliding_bytes"] < facts["kv_cache_bytes"]
    assert "engines cpu and cuda" in describe(facts)
    grown = plans[1]["kv_cache"] - plans[0]["kv_cache"]
    assert abs(grown - layout.growing_bytes // 2) <= 512
    session = model("gemma3", "cpu").session(capacity=200)
    assert session.state_bytes - session.constant_bytes == layout.growing_bytes
    every = model("mistral", "cpu").session(capacity=200)
    assert every.state_bytes == every.constant_bytes


def test_a_plan_that_looks_back_otherwise_than_the_model_is_refused() -> None:
    with open_bundle(bundle("mistral")) as opened:
        plan, config = open_plan(opened), opened.manifest.model
        entry = opened.manifest.entry("weights.bin")
    assert entry is not None
    layers = tuple(layer.model_copy(update={"window": None}) if layer.attends else layer
                   for layer in config.layers)  # fmt: skip
    check_plan(plan, config, weight_bytes=entry.size)
    with pytest.raises(BundleError, match="looks back 11 positions in 'layers"):
        check_plan(plan, config.model_copy(update={"layers": layers}), weight_bytes=entry.size)
