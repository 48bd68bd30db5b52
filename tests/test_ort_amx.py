"""Int8 products that ONNX Runtime before 1.25 computes wrongly on CPUs with AMX are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import edge
from edge import cpu
from edge.errors import EngineError
from edge.export.exporter import export_checkpoint
from edge.runtime import ort_session
from tests import checkpoints
from tests.transformers_checkpoints import save_mamba2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Mamba-2 whose first product has 180 outputs, 20 more than a multiple of 32."""
    folder = tmp_path_factory.mktemp("amx")
    text = folder / "text.txt"
    text.write_text(" ".join(checkpoints.CORPUS * 20))
    checkpoint = save_mamba2(folder / "checkpoint", state_size=11)
    export_checkpoint(
        checkpoint, folder / "bundle", quant="w8a8", calibrate=text, calibrate_sequences=4,
        calibrate_length=16, verify=False,
    )  # fmt: skip
    return folder / "bundle"


def test_wrong_products_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: Path | str, version: str, amx: bool) -> None:
        monkeypatch.setattr(cpu, "has_amx", lambda: amx)
        monkeypatch.setattr(ort_session.onnxruntime, "__version__", version)
        edge.load(model, engine="ort", threads=1)

    for version in ("1.23.2", "1.24.1"):
        with pytest.raises(EngineError, match=rf"{version} computes int8 products of 180 outputs"):
            load(bundle, version, amx=True)
    load(bundle, "1.25.0", amx=True)
    load(bundle, "1.23.2", amx=False)
    # a width of at most 16 more than a multiple of 32 is right
    load("demo", "1.23.2", amx=True)
