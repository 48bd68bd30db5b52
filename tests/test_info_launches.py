"""The report of `edge info --launches` on a plan."""

from __future__ import annotations

from pathlib import Path

from edge.apps.info import launches
from edge.plugins.lowering.plan import lower
from tests import int8_models
from tests.test_launch_plan import FUSED


def test_launches_weights_and_memory_of_every_kind_of_run(tmp_path: Path) -> None:
    int8_models.build_int8(tmp_path, ("int8", "fp16"))
    plan = lower((tmp_path / "graphs/ort.onnx").read_bytes(), tmp_path, ops=FUSED)
    facts = launches.collect(plan, int8_models.HYBRID, chunk=128, context=96)
    rows = {row["run"]: row for row in facts["programs"]}
    assert list(rows) == ["chain <= 1", "chain <= 16", "tree <= 16", "chain", "settle"]
    assert facts["variants"] == len(plan.variants)
    step, many = rows["chain <= 1"], rows["chain"]
    assert step["layer"] == {"mamba1": 6, "attention": 5, "mlp": 5, "mamba2": 5}
    # embedding, the norm of the head and the head belong to no layer
    assert step["launches"] == sum(step["layer"].values()) + 3
    assert many["layer"]["mamba1"] == 8 and rows["settle"]["launches"] == 4
    assert sum(step["kernels"].values()) == step["launches"]
    size = (tmp_path / "weights.bin").stat().st_size
    assert 0.8 * size < step["weight_bytes"] == many["weight_bytes"] <= size
    assert step["arena_bytes"] < rows["chain <= 16"]["arena_bytes"] < many["arena_bytes"]
    lines = launches.lines(facts)
    assert lines[2].split()[:5] == ["chain", "<=", "1", "1", str(step["launches"])]
    assert lines[2].endswith("mamba1 6, attention 5, mlp 5, mamba2 5")
