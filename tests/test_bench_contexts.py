"""The state of models against the tokens of context, as `edge info` counts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge.apps.bench.contexts import app
from edge.apps.cli import app as edge_app

PUBLISHED = Path(__file__).parent / "published"
MODELS = [str(PUBLISHED / f"{name}.json") for name in ("mamba2-130m", "smollm2-135m-instruct")]


@pytest.mark.parametrize(
    "model, longest",
    [*zip(MODELS, (30000, 8000), strict=True), ("demo", 500),
     (str(PUBLISHED / "gemma-3-1b-it.json"), 30000)],
)  # fmt: skip
def test_states_are_those_of_info(model: str, longest: int) -> None:
    done = CliRunner().invoke(app, [model, "--tokens", f"100,{longest}", "--json"])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)
    for context in (100, longest):
        told = CliRunner().invoke(edge_app, ["info", model, "--context", str(context), "--json"])
        facts = json.loads(told.stdout)
        caches = facts.get("kv_cache_sliding_bytes", facts["kv_cache_bytes"])
        assert found["state_bytes"][str(context)] == facts["state_bytes"] + caches
        assert found["parameters"] == facts["parameters"]


def test_the_table() -> None:
    done = CliRunner().invoke(app, [*MODELS, "--tokens", "512,8192"])
    assert done.exit_code == 0, done.output
    mamba, attention = (line for line in done.stdout.splitlines() if ".json" in line)
    *_, short, long = mamba.strip("| ").split("|")
    assert short.strip() == long.strip()
    assert "30 attention, 30 mlp" in attention
    none = CliRunner().invoke(app, [*MODELS, "--tokens", "512,0"])
    assert "--tokens: 0 is no length" in str(none.exception)
