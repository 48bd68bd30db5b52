"""The table of `make families`: whom it walks, and that what differs is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.errors import EngineError
from edge.export.checkpoint import FAMILIES
from edge.runtime.tensorrt import bindings
from tests.every_family import Cell, calibration_text, examine, judge
from tests.family_checkpoints import SAVE


def test_every_family_is_walked() -> None:
    assert {family.name for family in FAMILIES} == SAVE.keys()


def test_a_cell_that_agrees(tmp_path: Path) -> None:
    """A scan beside attention; and built, where TensorRT for RTX is installed."""
    try:
        rtx = bindings.load("rtx")
    except EngineError:
        rtx = None
    source, text = SAVE["falcon_h1"](tmp_path / "source"), calibration_text(tmp_path)
    cell = examine(source, tmp_path / "bundle", Cell("falcon_h1", "w8a8"), text, rtx)
    assert cell.problems == [] and cell.row().endswith("ok")
    assert 0 < cell.kl < 1 and 0 < cell.followed["cuda"] <= 1
    assert rtx is None or int(cell.rtx) > 0


def test_a_cell_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged as if x were never rounded, by an engine that rounds it."""
    monkeypatch.setattr("tests.cuda.following.ROUNDED", 1e-6)
    source, text = SAVE["arcee"](tmp_path / "source"), calibration_text(tmp_path)
    cell = examine(source, tmp_path / "bundle", Cell("arcee", "fp16"), text, None)
    assert cell.problems and all("1e-06 allowed" in problem for problem in cell.problems)


@pytest.mark.parametrize(
    ("spread", "steps", "found", "told"),
    [
        (0.0, 0, (0.08, 0.03), False),
        (0.0, 0, (0.081, 0.01), True),
        (0.05, 0, (0.1, 0.03), False),
        (0.0, 1, (0.2, 0.03), False),
        (0.0, 1, (0.2, 0.031), True),
        (0.0, 0, (float("nan"), 0.0), True),
    ],
)
def test_limits(spread: float, steps: int, found: tuple[float, float], told: bool) -> None:
    cell = Cell("family", "recipe", spread=(spread, spread / 2), steps=steps)
    judge(cell, "cuda", found)
    assert bool(cell.problems) == told


def test_a_model_that_cannot_be_exported_is_a_row(tmp_path: Path) -> None:
    cell = examine(tmp_path, tmp_path / "b", Cell("x", "fp16"), tmp_path, None)
    assert cell.problems and "config.json" in cell.row()
