"""`edge export --target`: the plan and the kernels of a new bundle, or of a finished one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto

from edge.apps import cli
from edge.apps.units import megabytes
from edge.bundle import Manifest, open_bundle
from edge.bundle.kernels import (
    DEVICE_GRAPH_FILE,
    PLAN_FILE,
    index_file,
    open_kernels,
    open_plan,
)
from edge.errors import BundleError, EdgeError, ExportError
from edge.export import kernels as exporting
from edge.export.exporter import export_checkpoint
from edge.export.retarget import add_targets
from edge.plugins.compiler import pool
from edge.plugins.lowering.plan import Lowered, LoweringError, walked
from edge.plugins.lowering.plan import plan_of as whole_plan
from edge.plugins.tensorrt.graph import device_graph
from edge.runtime.model import EMBEDDED, resolve
from tests import transformers_checkpoints
from tests.facts import says
from tests.int8_models import HYBRID, save_int8_bundle
from tests.test_kernels_bundle import VARIANTS, plan_of

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def quick(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a plan of two small kernels in place of the model's own, compiled once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    monkeypatch.setattr(exporting, "plan_of", lambda lowered: plan_of(HYBRID.vocab_size))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return save_int8_bundle(tmp_path / "int8", ("fp32", "fp32"))


def manifest_of(bundle: Path) -> Manifest:
    with open_bundle(bundle) as opened:
        opened.verify()
        return opened.manifest


def check_kernels(bundle: Path, *architectures: int) -> None:
    """Check that the bundle has the plan and exactly these kernels, and that they are cubins."""
    with open_bundle(bundle) as opened:
        opened.verify()
        plan = open_plan(opened)
        assert set(opened.manifest.kernels) == {f"sm_{sm}" for sm in architectures}
        for sm in architectures:
            kernels = open_kernels(opened, sm)
            assert set(kernels.index.kernels) == {v.key for v in plan.variants}
            for variant in VARIANTS:
                found, cubin = kernels.get(variant)
                assert cubin.startswith(b"\x7fELF") and found.symbol.encode() in cubin


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["edge", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_finished_bundle_keeps_its_weights(bundle: Path, tmp_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    summary = add_targets(
        bundle, tmp_path / "out", [87, 120], progress=lambda *said: stages.append(said)
    )
    check_kernels(tmp_path / "out", 87, 120)
    before, after = manifest_of(bundle), manifest_of(tmp_path / "out")
    assert summary.manifest == after and summary.path == tmp_path / "out"
    for entry in before.files:
        assert after.entry(entry.path) == entry
        assert os.path.samefile(bundle / entry.path, tmp_path / "out" / entry.path)
    changed = {"graphs", "kernels", "files"}
    assert after.model_dump(exclude=changed) == before.model_dump(exclude=changed)
    made = {"cuda": PLAN_FILE, "tensorrt": DEVICE_GRAPH_FILE}
    assert after.graphs == before.graphs | made
    shares = [share for _, share in stages]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert ("kernels 4/4", 0.9) in stages


def test_it_is_the_same_every_time_and_may_replace_itself(bundle: Path, tmp_path: Path) -> None:
    add_targets(bundle, tmp_path / "out", [87])
    data = (tmp_path / "out/manifest.json").read_bytes()
    add_targets(tmp_path / "out", tmp_path / "out", [87])
    assert (tmp_path / "out/manifest.json").read_bytes() == data
    add_targets(bundle, bundle, [87])
    assert (bundle / "manifest.json").read_bytes() == data
    check_kernels(bundle, 87)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["int8", "out"]


def test_targets_are_added_to_those_there(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_targets(bundle, tmp_path / "one")  # only the plan
    check_kernels(tmp_path / "one")
    add_targets(tmp_path / "one", tmp_path / "two", [120])
    add_targets(tmp_path / "two", tmp_path / "three", [87])
    check_kernels(tmp_path / "three", 87, 120)
    # another plan has another variant: nothing of the old one remains
    shorter = plan_of(HYBRID.vocab_size)
    shorter = shorter.model_copy(
        update={
            "variants": shorter.variants[:1],
            "launches": shorter.launches[:1],
            "programs": tuple(
                p.model_copy(update={"launches": p.launches[:1]}) for p in shorter.programs
            ),
        }
    )
    monkeypatch.setattr(exporting, "plan_of", lambda lowered: shorter)
    add_targets(tmp_path / "three", tmp_path / "four")
    listed = {e.path for e in manifest_of(tmp_path / "four").files if "kernels" in e.path}
    assert listed == {
        path
        for sm in (87, 120)
        for path in (index_file(sm), f"kernels/sm_{sm}/{VARIANTS[0].key}.cubin")
    }


def test_files_are_copied_where_they_cannot_be_linked(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*arguments: Any, **options: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", link)
    add_targets(bundle, tmp_path / "out")
    after = manifest_of(tmp_path / "out")
    for entry in manifest_of(bundle).files:
        assert after.entry(entry.path) == entry
        assert not os.path.samefile(bundle / entry.path, tmp_path / "out" / entry.path)


def test_what_fails_leaves_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise ExportError("cannot be compiled", field="some.kernel")

    before = {p: p.read_bytes() for p in bundle.rglob("*") if p.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(pool.Worker, "compile", refuse)
        with pytest.raises(ExportError, match=r"some\.kernel"):
            add_targets(bundle, bundle, [90])
    with monkeypatch.context() as patch:
        without_triton(patch)
        with pytest.raises(ExportError, match=r"--target: .*pip install 'mamba-edge\[kernels\]'"):
            add_targets(bundle, bundle, [87])
    (bundle / "weights.bin").write_bytes(b"?" * (bundle / "weights.bin").stat().st_size)
    with pytest.raises(BundleError, match=r"weights\.bin.*SHA-256"):
        add_targets(bundle, tmp_path / "out", [87])
    assert [p.name for p in tmp_path.iterdir()] == ["int8"]
    del before[bundle / "weights.bin"]
    assert all(path.read_bytes() == data for path, data in before.items())


def test_a_graph_without_kernels(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_in(model: bytes, folder: Path) -> Lowered:
        raise LoweringError("no kernel runs Strange", field="layers.0.strange")

    monkeypatch.setattr(exporting, "walked", stand_in)
    summary = add_targets(bundle, tmp_path / "out")
    assert summary.unplanned == "layers.0.strange: no kernel runs Strange"
    assert manifest_of(tmp_path / "out").graphs == manifest_of(bundle).graphs
    with pytest.raises(LoweringError, match="no kernel runs Strange"):
        add_targets(bundle, tmp_path / "more", [87])


def test_a_plan_without_a_graph_of_plugins(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The export's note when a device op takes less than its kernel does."""

    def refuse(model: bytes, lowered: Lowered) -> ModelProto:
        raise LoweringError("reads some columns of 'wide' as x", field="layers.0.norm")

    out = tmp_path / "out"
    add_targets(bundle, out)
    assert (out / DEVICE_GRAPH_FILE).is_file()
    monkeypatch.setattr(exporting, "device_graph", refuse)
    assert run(monkeypatch, "export", out, "-o", out, "--target", "cpu") == 0
    said = capsys.readouterr().out
    assert says(said, "tensorrt", "no graph: ", "layers.0.norm: ", "'wide' as x")
    assert manifest_of(out).graphs == manifest_of(bundle).graphs | {"cuda": PLAN_FILE}
    assert not (out / DEVICE_GRAPH_FILE).exists()


def test_a_checkpoint_is_exported_with_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "plan_of", lambda lowered: plan_of(512))
    source = transformers_checkpoints.save_mamba2(tmp_path / "checkpoint")
    with monkeypatch.context() as patch:
        without_triton(patch)
        with pytest.raises(ExportError, match="needs the package triton"):
            export_checkpoint(source, tmp_path / "out", architectures=[87])
    summary = export_checkpoint(source, tmp_path / "out", architectures=[87], verify=False)
    size = sum(e.size for e in summary.manifest.files if e.path.startswith("kernels/"))
    assert summary.to_dict()["kernels"] == {"sm_87": {"kernels": 2, "bytes": size}}
    assert open_bundle(tmp_path / "out").manifest.kernels == {"sm_87": index_file(87)}


def test_the_command_line(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert run(monkeypatch, "export", bundle, "-o", out, "--target", "cpu,orin-nano") == 0
    assert "  kernels     sm_87: 2 in " in capsys.readouterr().out
    check_kernels(out, 87)
    assert run(monkeypatch, "export", out, "-o", out, "--target", "sm_120", "--json") == 0
    told = json.loads(capsys.readouterr().out)["kernels"]
    assert list(told) == ["sm_87", "sm_120"] and told["sm_87"]["kernels"] == 2
    assert run(monkeypatch, "info", out) == 0
    lines = capsys.readouterr().out
    assert "  kernels     sm_87: 2 in " in lines and "sm_120: 2 in " in lines
    assert index_file(87) in lines and ".cubin" not in lines
    size = (out / DEVICE_GRAPH_FILE).stat().st_size
    assert f"tensorrt    a graph of {megabytes(size)} to build" in lines
    assert run(monkeypatch, "info", out, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kernels"] == told and facts["graphs"]["cuda"] == PLAN_FILE
    assert sum("cubin" in path for path in facts["files"]) == 4


@pytest.mark.parametrize("target", ["sm_88", "orin", "cpu,gpu"])
def test_an_unknown_target_is_a_mistake_in_usage(
    target: str,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert run(monkeypatch, "export", bundle, "-o", tmp_path / "o", "--target", target) == 2
    said = capsys.readouterr().err
    assert "unknown target" in said and "sm_87 (orin-nano" in said and "sm_120" in said
    assert not (tmp_path / "o").exists()


def test_options_that_change_weights_do_not_retarget(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An int8 bundle cannot be quantized again, but --quant asks for that."""
    for option in (["--quant", "w8"], ["--groups"], ["--ssm-state", "int8"]):
        code = run(monkeypatch, "export", bundle, "-o", tmp_path / "o", "--target", "cpu", *option)
        assert code == 1 and "stored as int8" in capsys.readouterr().err


def test_a_damaged_index_shows_in_info(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_targets(bundle, bundle, [87])
    with (bundle / index_file(87)).open("ab") as file:
        file.write(b" ")
    assert run(monkeypatch, "info", bundle) == 1
    assert index_file(87) in capsys.readouterr().err


def test_errors_are_the_packages_own(tmp_path: Path) -> None:
    with pytest.raises(EdgeError):
        add_targets(tmp_path / "nothing", tmp_path / "out", [87])


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_demonstration_has_the_graphs_that_this_version_makes(name: str) -> None:
    with open_bundle(resolve(name)) as bundle:
        model = bundle.read(bundle.manifest.graphs["ort"])
        again = f"edge export apps/bundles/{name} -o apps/bundles/{name} --target cpu"
        found = bundle.read(PLAN_FILE)
        lowered = walked(model, bundle.path)
        made = whole_plan(lowered).to_json()
        assert found == made, f"lowerings have changed; make the plan again: {again}"
        assert len(found) < 200_000
        open_plan(bundle)
        found = bundle.read(DEVICE_GRAPH_FILE)
        made = device_graph(model, lowered).SerializeToString(deterministic=True)
        assert found == made, f"device ops have changed; make the graph again: {again}"
        assert len(found) < 100_000
