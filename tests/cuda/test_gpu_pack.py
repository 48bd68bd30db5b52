"""`tests/gpu/pack.sh` with a few tests: the kit is complete, and its contents are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge.launch import Variant
from edge.plugins.compiler import aot, cache, pool
from tests.cuda.fake_driver import driver
from tests.gpu.variants import of_bundle, of_model, read

pytest.importorskip("triton")
pytestmark = pytest.mark.without_gpu

ROOT = Path(__file__).parents[2]
TESTS, SM = "tests/kernels/test_embed.py", 87


def outside() -> dict[str, str]:
    """The environment without the variables set by tests."""
    inside = ("PYTEST", "EDGE", "TRITON", "FAKE_CUDA")
    return {name: value for name, value in os.environ.items() if not name.startswith(inside)}


def packed(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Pack the tests of one file, without wheels and models."""
    own = {
        "KIT": str(folder / "kit"), "THERE": str(folder / "there"), "PYTHON": sys.executable,
        "XDG_CACHE_HOME": str(folder / "cache"), "FILES": TESTS, "JOBS": "0",
        "WHEELS": "", "MODELS": "", "DEMOS": "",
    }  # fmt: skip
    return subprocess.run(
        [ROOT / "tests/gpu/pack.sh", str(SM)], env=outside() | own | settings,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_one_that_is_too_large_is_said_to_be(tmp_path: Path) -> None:
    done = packed(tmp_path, LIMIT_MB="1")
    assert done.returncode == 1 and "more than 1 MiB" in done.stderr


def test_a_kit_is_whole_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = packed(tmp_path)
    assert done.returncode == 0, done.stderr
    kit = {file.name for file in (tmp_path / "kit").iterdir()}
    assert {name for name in kit if not name.endswith(".so")} == {"kernels.tar.xz"}
    assert "bytes with the tree, of 67108864" in done.stdout
    lines = [line for line in done.stdout.splitlines() if "tests/gpu/run.sh" in line]
    assert [line.partition("run.sh ")[2][0] for line in lines] == ["A", "B", "C"]
    assert all(len(line) < 2000 for line in lines)
    run_where_nothing_can_be_compiled(lines[2], tmp_path)
    take_whatever_triton_is_there(
        tmp_path / "there/kernels", read(tmp_path / "kit.work/variants"), monkeypatch
    )


def run_where_nothing_can_be_compiled(line: str, folder: Path) -> None:
    """The printed line unpacks, runs the tests as on a GPU, and leaves one file of results. A
    driver of the tests accepts the cubins but computes nothing.
    """
    log, empty, kernels = folder / "log", folder / "empty", folder / "there/kernels"
    programs = folder / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").symlink_to("/bin/true")
    own = {
        "PYTHON": sys.executable, "FILES": TESTS, "OUT": str(folder),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(driver().parent), "FAKE_CUDA_LOG": str(log),
        "FAKE_CUDA_SM": str(SM), "TRITON_PTXAS_PATH": "/bin/false", "XDG_CACHE_HOME": str(empty),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=outside() | own,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    (said,) = [x for x in done.stdout.splitlines() if x.startswith("test_embed ")]
    assert done.returncode == 1 and said.split()[1:3] == ["FAILED", "(1)"], done.stdout
    assert "failed" in said and "skipped" not in said
    assert (folder / "gpu-C.tar.gz").stat().st_size > 500
    told = (folder / "there/gpu-C/test_embed.log").read_text()
    assert "AssertionError" in told and "ExportError" not in told, told
    assert not empty.exists(), "something was compiled"
    # except the first kernel, which step A launches
    assert log.read_text().count("\nlaunch ") >= len(list(kernels.iterdir())) - 1 > 2


def take_whatever_triton_is_there(
    kernels: Path, noted: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernels.parent / "cache"))
    monkeypatch.setenv(cache.PRECOMPILED, str(kernels))
    monkeypatch.setattr(aot, "triton_version", lambda: "3.6.0")

    def never(self: pool.Worker, *_: object) -> pool.Compiled:
        raise AssertionError("compiled again")

    monkeypatch.setattr(pool.Worker, "compile", never)
    made = aot.compile_variants(noted, [SM])[SM]
    assert {made.get(each)[0].symbol for each in noted} >= {"quantize"}
    assert len(made.cubins) == len(noted) == len(list(kernels.iterdir()))


def test_a_models_kernels_are_those_of_one_period_of_its_layers(tmp_path: Path) -> None:
    from edge.apps.bench.models import MODELS, write_bundle

    config = MODELS["tiny-hybrid"]
    deep = config.model_copy(update={"layers": config.layers * 2})
    whole = of_bundle(write_bundle(deep, "w8a8", tmp_path / "deep", chunk=512))
    assert {each.key for each in of_model("tiny-hybrid", "w8a8")} == {each.key for each in whole}
