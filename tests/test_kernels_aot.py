"""Kernels become cubins: the same bytes everywhere, resources read correctly, kept in a cache."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import edge
from edge.errors import ExportError
from edge.launch import CompiledKernel, LaunchPlan, Variant
from edge.plugins import catalogue
from edge.plugins.compiler import __main__ as command
from edge.plugins.compiler import aot, cache, cubin, pool, worker
from edge.plugins.lowering.plan import lower
from tests import quantized_models

pytest.importorskip("triton")


def rounding(width: int = 256, aligned: bool = True, **changes: Any) -> Variant:
    """Return `quantize` of `width` channels with one scale."""
    at16 = ":16" if aligned else ""
    fields: dict[str, Any] = {
        "kernel": "rounding.quantize",
        "arguments": ("x", "scale", "y"),
        "types": (f"*fp32{at16}", "*fp32", f"*i8{at16}"),
        "constants": {
            "WIDTH": width, "X_STRIDE": width, "SCALES": 1, "BACK": False, "BLOCK": width,
        },
        "warps": 2,
    }  # fmt: skip
    return Variant(**fields | changes)


def rows(width: int, scale: bool = True, warps: int = 4) -> Variant:
    """Return `quantize_rows`, without stored scales if `scale` is False."""
    constants = {"WIDTH": width, "X_STRIDE": width, "BACK": not scale, "BLOCK": width}
    return Variant.model_validate({
        "kernel": "rounding.quantize_rows",
        "arguments": ("x", "scale", "y") if scale else ("x", "y"),
        "types": ("*fp32:16", "*fp32", "*i8:16") if scale else ("*fp32:16", "*fp32:16"),
        "constants": constants if scale else {"scale": None, **constants},
        "warps": warps,
    })  # fmt: skip


def said_by(tool: str, *arguments: str | Path) -> str:
    """Return the output of one of NVIDIA's tools, if Triton ships it."""
    folder = Path(str(importlib.metadata.distribution("triton").locate_file("triton")))
    path = folder / "backends/nvidia/bin" / tool
    if not path.exists():
        pytest.skip(f"this Triton has no {tool}")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/mamba-edge/kernels"


@pytest.fixture(scope="module")
def compiler() -> Iterator[pool.Worker]:
    """One for many tests: starting one takes as long as ten small kernels."""
    with pool.Worker() as started:
        yield started


class Shared:
    """Replaces the starting of workers; one worker compiles each kernel once."""

    made: ClassVar[dict[tuple[str, int], pool.Compiled]] = {}
    lock = threading.Lock()

    def __init__(self, compiler: pool.Worker, counts: Counter[tuple[str, int]]) -> None:
        self._compiler, self._counts = compiler, counts

    def __call__(self) -> Shared:
        return self

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def compile(self, variant: Variant, sm: int) -> pool.Compiled:
        key = variant.key, sm
        with self.lock:
            self._counts[key] += 1
            if key not in self.made:
                self.made[key] = self._compiler.compile(variant, sm)
            return self.made[key]


@pytest.fixture
def compiled(compiler: pool.Worker, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Count how often each kernel is requested, with workers that are all the same one."""
    counts: Counter[tuple[str, int]] = Counter()
    monkeypatch.setattr(pool, "Worker", Shared(compiler, counts))
    return counts


def test_the_same_bytes_wherever_they_are_compiled(
    compiler: pool.Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"  # of the parent: workers do not have it
    first = {
        (sm, width): compiler.compile(rounding(width), sm)
        for sm in (87, 120)
        for width in (64, 256)
    }
    there = tmp_path / "another folder"
    there.mkdir()
    monkeypatch.chdir(there)
    monkeypatch.setenv("TMPDIR", str(there))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(there))
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    again = aot.compile_variants([rounding(256), rounding(64)], [120, 87])
    for (sm, width), made in first.items():
        assert again[sm].get(rounding(width)) == (made.kernel, made.cubin)
        assert str(Path(edge.__file__).parent.parent).encode() not in made.cubin
        assert b".py" not in made.cubin and b"/tmp" not in made.cubin


@pytest.mark.usefixtures("compiled")
def test_what_a_kernel_takes() -> None:
    kernel, data = aot.compile_variant(rounding(), 87)
    assert kernel.symbol == "quantize" and data[:4] == b"\x7fELF"
    assert kernel.file == f"{rounding().key}.cubin"
    assert kernel.local_bytes == 0 and 8 < kernel.registers < 64
    found = cubin.resources(data, kernel.symbol)
    assert found.threads == 64 and found.parameters == 3 + kernel.scratch
    # a maximum over a row with several warps goes through shared memory
    assert aot.compile_variant(rows(1024), 87)[0].shared_bytes > 0


@pytest.mark.usefixtures("compiled")
def test_an_absent_pointer_is_no_parameter() -> None:
    kernel, data = aot.compile_variant(rows(64, scale=False), 87)
    assert cubin.resources(data, kernel.symbol).parameters == 2 + kernel.scratch


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("sm", [75, 87, 120])
def test_registers_that_run_out_show_as_cuobjdump_shows_them(sm: int, tmp_path: Path) -> None:
    kernel, data = aot.compile_variant(rows(8192, warps=1), sm)  # 256 values per thread
    assert kernel.local_bytes > 0
    (tmp_path / "a.cubin").write_bytes(data)
    said = said_by("cuobjdump", "-res-usage", tmp_path / "a.cubin")
    assert f"REG:{kernel.registers} STACK:{kernel.local_bytes} " in said


@pytest.mark.usefixtures("compiled")
def test_alignment_gives_wide_loads(tmp_path: Path) -> None:
    wide = []
    for aligned in (True, False):
        (tmp_path / "a.cubin").write_bytes(aot.compile_variant(rounding(aligned=aligned), 87)[1])
        wide.append("LDG.E.128" in said_by("nvdisasm", tmp_path / "a.cubin"))
    assert wide == [True, False]


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        (rounding(arguments=("x", "y", "scale")), "its parameters are x, scale, y, WIDTH"),
        (rounding(constants={"WIDTH": 4, "OTHER": 1}), "OTHER"),
        (rounding(kernel="rounding.nothing"), "no such kernel"),
        (rounding(kernel="nothing.quantize"), "no such kernel"),
        (rounding(types=("i32", "*fp32", "*i8")), "rounding.quantize: cannot be compiled for sm_8"),
        (rounding(width=100), "power of 2"),
    ],
)
def test_what_cannot_be_compiled_is_named(
    variant: Variant, said: str, compiler: pool.Worker
) -> None:
    with pytest.raises(ExportError) as caught:
        compiler.compile(variant, 87)
    assert said in str(caught.value) and caught.value.field == variant.kernel
    # the worker still works
    assert compiler.compile(rounding(), 87).kernel.symbol == "quantize"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("sm", "changes", "said"),
    [
        (89, {"shared": 100 << 10}, "a block has 99 KB"),
        (75, {"shared": (64 << 10) + 1}, "a block has 64 KB"),
        (87, {"global_scratch_size": 128}, "128 bytes of global_scratch_size"),
        (87, {"profile_scratch_size": 1}, "1 bytes of profile_scratch_size"),
    ],
)
def test_what_no_launch_could_give(sm: int, changes: dict[str, int], said: str) -> None:
    _, data = aot.compile_variant(rounding(), sm)
    metadata = {"name": "quantize", "global_scratch_size": 0, "profile_scratch_size": 0}
    fits = SimpleNamespace(**metadata, shared=64 << 10)
    assert worker.described(rounding(), sm, fits, data).shared_bytes == 64 << 10
    with pytest.raises(ExportError, match=said):
        asks = SimpleNamespace(**{**metadata, "shared": 0, **changes})
        worker.described(rounding(), sm, asks, data)
    with pytest.raises(ExportError, match="blocks of 64 threads, not 128"):
        worker.described(rounding(warps=4), sm, fits, data)


def test_one_that_fails_ends_the_others(compiled: Counter[tuple[str, int]]) -> None:
    wrong = rounding(kernel="rounding.nothing")
    with pytest.raises(ExportError, match="no such kernel"):
        aot.compile_variants([wrong, *(rounding(2**n) for n in range(5, 11))], [75, 80, 86, 87])
    assert sum(compiled.values()) < 12


def test_a_worker_that_takes_too_long_or_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pool, "LIMIT", 0.0)
        with pool.Worker() as worker, pytest.raises(ExportError, match="it took more than"):
            worker.compile(rounding(), 87)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pool.Worker() as worker, pytest.raises(ExportError, match="the compiler exited with 1"):
        worker.compile(rounding(), 87)


def test_without_triton_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ExportError, match=r"pip install 'mamba-edge\[kernels\]'"):
        aot.compile_variants([rounding()], [87])


def test_a_second_compile_is_a_pure_hit(compiled: Counter[tuple[str, int]]) -> None:
    variants = [rounding(64), rounding(128), rounding(64)]
    told: list[tuple[int, int]] = []
    first = aot.compile_variants(variants, [87, 89], lambda done, of: told.append((done, of)))
    assert sum(compiled.values()) == len(compiled) == 4
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    compiled.clear()
    again = aot.compile_variants(variants, [87, 89], lambda done, of: told.append((done, of)))
    assert not compiled and told[5:] == [(4, 4)]
    assert again == first and again[87].index.to_json() == first[87].index.to_json()
    assert again[87].index.sm == 87 and again[87].index.triton == aot.triton_version()
    assert set(again[87].cubins) == {k.file for k in again[87].index.kernels.values()}
    aot.compile_variants([*variants, rounding(32)], [89])
    assert dict(compiled) == {(rounding(32).key, 89): 1}


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_entry_is_made_again(
    damage: str, cache_folder: Path, compiled: Counter[tuple[str, int]]
) -> None:
    first = aot.compile_variants([rounding()], [87])
    (kept,) = cache_folder.iterdir()
    whole = kept.read_bytes()
    flipped = whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]
    kept.write_bytes({"cut": whole[:-1], "flip": flipped, "empty": b"", "other": b"x" * 99}[damage])
    assert aot.compile_variants([rounding()], [87]) == first
    assert dict(compiled) == {(rounding().key, 87): 2}
    assert [path.name for path in cache_folder.iterdir()] == [kept.name]
    assert kept.read_bytes() == whole


def test_an_entry_is_named_by_all_that_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = cache.entry(rounding(), 87, "3.9.0")
    others = [
        cache.entry(rounding(128), 87, "3.9.0"),
        cache.entry(rounding(), 89, "3.9.0"),
        cache.entry(rounding(), 87, "3.8.0"),
        cache.entry(rounding(stages=3), 87, "3.9.0"),
    ]
    tool = tmp_path / "ptxas"
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    for content in ("", "one"):
        tool.write_text(content)
        others.append(cache.entry(rounding(), 87, "3.9.0"))
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    monkeypatch.setattr(cache, "sources", lambda _: "changed")
    others.append(cache.entry(rounding(), 87, "3.9.0"))
    assert len({plain, *others}) == 8


@pytest.fixture
def own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels' files, which sets the cache keys; workers compile the real ones."""
    copy = tmp_path / "plugins"
    shutil.copytree(catalogue.FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(catalogue, "FOLDER", copy)
    cache.sources.cache_clear()
    yield copy
    cache.sources.cache_clear()


@pytest.mark.parametrize(
    ("file", "again"),
    [
        ("quantize/triton_rounding", True),
        ("kernels/common", True),
        ("norm/triton_norm", False),
        ("linear/triton_linear", False),
    ],
)
def test_a_kernel_is_compiled_again_when_its_file_or_one_that_it_imports_changes(
    file: str, again: bool, own_sources: Path, compiled: Counter[tuple[str, int]]
) -> None:
    aot.compile_variants([rounding()], [87])
    with (own_sources / f"{file}.py").open("a") as changed:
        changed.write("# changed\n")
    cache.sources.cache_clear()
    aot.compile_variants([rounding()], [87])
    assert compiled[rounding().key, 87] == 1 + again


def test_what_a_file_imports_counts_with_what_that_imports(own_sources: Path) -> None:
    every = [
        file.stem.removeprefix("triton_") for file in sorted(own_sources.glob("*/triton_*.py"))
    ]
    before = {name: cache.sources(name) for name in every}
    assert len(set(before.values())) == len(every)
    (own_sources / "kernels/replay.py").write_text("# changed")
    cache.sources.cache_clear()
    changed = [name for name in every if cache.sources(name) != before[name]]
    # linear_conv imports conv, which imports replay
    assert sorted(changed) == [
        "conv",
        "delta_chunks",
        "delta_rule",
        "delta_terms",
        "linear_conv",
        "scan",
        "scan_chunks",
        "scan_heads",
        "scan_parts",
        "scan_terms",
    ]


@pytest.fixture
def elsewhere(
    compiled: Counter[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder of kernels that another machine compiled, with another Triton than here."""
    folder = tmp_path / "precompiled"
    variants = [rounding(64), rounding(128)]
    aot.compile_variants(variants, [90])
    folder.mkdir()
    for each in variants:
        kept = cache.entry(each, 90, aot.triton_version())
        (folder / cache.precompiled(each, 90)).write_bytes(kept.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other cache"))
    monkeypatch.setenv(cache.PRECOMPILED, str(folder))
    monkeypatch.setattr(aot, "triton_version", lambda: "3.6.0")
    compiled.clear()
    return folder


def test_kernels_of_another_machine_are_taken(
    elsewhere: Path, compiled: Counter[tuple[str, int]]
) -> None:
    built = aot.compile_variants([rounding(64), rounding(128)], [90])[90]
    assert not compiled and built.get(rounding(64))[0].symbol == "quantize"
    assert built.get(rounding(128))[1][:4] == b"\x7fELF"
    # for another architecture they are useless
    aot.compile_variants([rounding(64)], [87])
    assert dict(compiled) == {(rounding(64).key, 87): 1}


def test_a_bundle_takes_none_of_another_machine(
    elsewhere: Path, compiled: Counter[tuple[str, int]]
) -> None:
    """Its index says which Triton made its kernels."""
    aot.compile_variants([rounding(64)], [90], precompiled=False)
    assert dict(compiled) == {(rounding(64).key, 90): 1}


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_damaged_kernels_of_another_machine_are_compiled_here(
    damage: str, elsewhere: Path, compiled: Counter[tuple[str, int]]
) -> None:
    file = elsewhere / cache.precompiled(rounding(64), 90)
    whole = file.read_bytes()
    flipped = whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]
    file.write_bytes({"cut": whole[:-1], "flip": flipped, "empty": b"", "gone": b""}[damage])
    if damage == "gone":
        file.unlink()
    left = {each.name: each.read_bytes() for each in elsewhere.iterdir()}
    built = aot.compile_variants([rounding(64), rounding(128)], [90])[90]
    assert dict(compiled) == {(rounding(64).key, 90): 1}
    assert built.get(rounding(64))[0].symbol == "quantize"
    assert {each.name: each.read_bytes() for each in elsewhere.iterdir()} == left


@pytest.mark.usefixtures("compiled")
def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    built = aot.compile_variants([rounding()], [87])
    assert built[87].get(rounding())[0].symbol == "quantize"


@pytest.mark.usefixtures("compiled")
def test_bytes_that_are_no_cubin() -> None:
    _, data = aot.compile_variant(rounding(), 87)
    for broken in (b"", b"\x7fELF", data[:100], data[: len(data) // 2], b"x" * 5000):
        with pytest.raises(ExportError, match="cannot read the cubin"):
            cubin.resources(broken, "quantize")
    with pytest.raises(ExportError, match="cannot read the cubin"):
        cubin.resources(data, "another")


@pytest.mark.usefixtures("compiled")
def test_the_table_tells_what_spills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*variants: Variant) -> tuple[int, list[str]]:
        plan = LaunchPlan(
            variants=variants, launches=(), programs=(), values={}, inputs={}, weights={}
        )
        (tmp_path / "cuda.json").write_bytes(plan.to_json())
        arguments = [str(tmp_path / "cuda.json"), "--sm", "75,87", "--table"]
        monkeypatch.setattr(sys, "argv", ["compiler", *arguments])
        return command.main(), capsys.readouterr().out.splitlines()

    code, lines = run(rounding(), rows(64))
    assert code == 0 and len(lines) == 1 + 4 + 2
    assert "rounding.quantize BACK=False BLOCK=256" in lines[1] and lines[1].split()[:2] == [
        "75",
        "2",
    ]
    assert lines[-1].startswith("sm_87: 2 kernels, ") and lines[-1].endswith("0 with local memory")
    code, lines = run(rows(8192, warps=1))
    assert code == 1 and lines[-1].endswith("1 with local memory")


@pytest.mark.usefixtures("compiled")
def test_what_the_cache_keeps_is_what_an_index_says(cache_folder: Path) -> None:
    built = aot.compile_variants([rounding()], [87])[87]
    (kept,) = cache_folder.iterdir()
    header = kept.read_bytes()[64:].partition(b"\n")[0]
    stored = CompiledKernel.model_validate(json.loads(header)["kernel"])
    assert built.index.kernels == {rounding().key: stored}
    assert json.loads(header)["ptxas"] == built.index.ptxas


@pytest.mark.parametrize(("model", "sm"), [("mamba1", 87), ("mamba2", 120)])
def test_a_models_kernels_stay_in_registers(
    model: str, sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/test_kernels_sass.py checks the products of each architecture."""
    monkeypatch.undo()  # compiled into the shared cache: tests/cuda launches them too
    graph = quantized_models.built(model, quantized_models.plan_of(model, "w8a8")[1], tmp_path)
    plan = lower(graph.graph.read_bytes(), tmp_path)
    built = aot.compile_variants(plan.variants, [sm])[sm]
    assert {variant.key for variant in plan.variants} == set(built.index.kernels)
    assert len(built.cubins) == len(plan.variants) >= 15
    spilled = {key: k for key, k in built.index.kernels.items() if k.local_bytes}
    assert not spilled, f"sm_{sm}: {sorted(spilled)}"
    for variant in plan.variants:
        kernel, data = built.get(variant)
        found = cubin.resources(data, kernel.symbol)
        assert found.parameters == len(variant.arguments) + kernel.scratch
