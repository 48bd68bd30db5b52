"""A bundle's plan and kernels: altered or missing files are refused, by name, with a remedy."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge.bundle import BundleWriter, Manifest, open_bundle
from edge.bundle.kernels import PLAN_FILE, index_file, open_kernels, open_plan, sizes
from edge.errors import BundleError, EngineError, InputError
from edge.export.targets import NAMES, architectures, describe
from edge.launch import (
    ARCHITECTURES,
    Buffer,
    CompiledKernel,
    KernelIndex,
    Launch,
    LaunchPlan,
    Pointer,
    Program,
    Size,
    Variant,
    Weight,
)
from edge.plugins.compiler import fallback, pool
from tests.facts import says
from tests.test_bundle import FIELDS, edit_manifest

VARIANTS = tuple(
    Variant(
        kernel="rounding.quantize",
        arguments=("x", "scale", "y"),
        types=("*fp32:16", "*fp32", "*fp32:16"),
        constants={"WIDTH": w, "X_STRIDE": w, "SCALES": 1, "BACK": True, "BLOCK": w},
    )
    for w in (64, 128)
)


def plan_of(vocabulary: int) -> LaunchPlan:
    """Return a plan that rounds a value to logits, twice, for a model with this many tokens."""
    rows = Buffer(dtype="f32", elements=Size(times=vocabulary, of="LB"))
    arguments = (
        Pointer(space="value", name="x"),
        Pointer(space="weight", name="w"),
        Pointer(space="value", name="logits"),
    )
    return LaunchPlan(
        variants=VARIANTS,
        launches=tuple(
            Launch(variant=i, grid=(Size(of="LB"), Size(), Size()), arguments=arguments)
            for i in range(len(VARIANTS))
        ),
        programs=(
            Program(kind="chain", max_rows=None, launches=(0, 1)),
            Program(kind="settle", max_rows=None, launches=()),
        ),
        values={"x": rows, "logits": rows},
        inputs={},
        weights={"w": Weight(dtype="f32", offset=0, elements=250)},
    )


PLAN = plan_of(FIELDS["model"].vocab_size)


def cubin(variant: Variant, sm: int) -> bytes:
    """A stand-in for a cubin: bundles only hash it."""
    return f"{variant.key} {sm}".encode() * 10


def index(sm: int, variants: tuple[Variant, ...] = VARIANTS) -> KernelIndex:
    kernels = {
        v.key: CompiledKernel(file=f"{v.key}.cubin", symbol="k", shared_bytes=0, scratch=2)
        for v in variants
    }
    return KernelIndex(sm=sm, triton="3.9.0", ptxas="12.9", kernels=kernels)


def write(
    target: Path, change: Callable[[BundleWriter], None] = lambda writer: None, **fields: Any
) -> Manifest:
    with BundleWriter(target) as writer:
        writer.path("graphs/ort.onnx").write_bytes(b"graph")
        writer.path("weights.bin").write_bytes(b"w" * 1000)
        writer.path(PLAN_FILE).write_bytes(PLAN.to_json())
        for sm in (87, 120):
            writer.path(index_file(sm)).write_bytes(index(sm).to_json())
            for v in VARIANTS:
                writer.path(f"kernels/sm_{sm}/{v.key}.cubin").write_bytes(cubin(v, sm))
        change(writer)
        graphs = {"ort": "graphs/ort.onnx", "cuda": PLAN_FILE}
        kernels = {f"sm_{sm}": index_file(sm) for sm in (87, 120)}
        return writer.finish(**{**FIELDS, "graphs": graphs, "kernels": kernels, **fields})


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write(tmp_path / "b")
    return tmp_path / "b"


def refused(bundle: Path, sm: int = 87) -> BundleError:
    """Return the error of opening the bundle, its plan and one of its kernels."""
    with pytest.raises(BundleError) as caught, open_bundle(bundle) as opened:
        open_plan(opened)
        open_kernels(opened, sm).get(VARIANTS[1])
    assert caught.value.remedy is not None
    return caught.value


def test_what_was_written_reads_back(bundle: Path) -> None:
    with open_bundle(bundle) as opened:
        opened.verify()
        assert open_plan(opened) == PLAN
        for sm in (87, 120):
            kernels = open_kernels(opened, sm)
            assert kernels.index == index(sm)
            for variant in VARIANTS:
                found, data = kernels.get(variant)
                assert data == cubin(variant, sm) and found.symbol == "k"
        assert list(sizes(opened.manifest)) == ["sm_87", "sm_120"]
        count, size = sizes(opened.manifest)["sm_87"]
        there = list((bundle / "kernels/sm_87").iterdir())
        assert count == 2 and size == sum(path.stat().st_size for path in there)


def test_without_kernels_a_manifest_is_what_it_was(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b") as writer:
        writer.path("graphs/ort.onnx").write_bytes(b"graph")
        manifest = writer.finish(**FIELDS)
    assert "kernels" not in json.loads(manifest.to_json())
    problem = refused(tmp_path / "b")
    assert problem.field == "graphs.cuda" and "no launch plan" in problem.message
    assert f"edge export {tmp_path / 'b'} -o NEW_BUNDLE --target cpu" in str(problem)


def test_an_architecture_that_is_not_there(bundle: Path) -> None:
    problem = refused(bundle, sm=86)
    assert problem.field == "kernels.sm_86"
    assert "only: sm_120, sm_87" in problem.message
    assert "--target sm_86" in str(problem) and "install Triton" in str(problem)


def test_damage_is_seen_before_the_first_use(bundle: Path) -> None:
    file = bundle / f"kernels/sm_87/{VARIANTS[1].key}.cubin"
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", whole + b"!", whole[:50] + b"?" + whole[51:]):
        file.write_bytes(damaged)
        problem = refused(bundle)
        assert problem.file == str(file)
        assert "manifest says" in problem.message or "SHA-256" in problem.message
        with open_bundle(bundle) as opened:  # the others are unchanged
            assert open_kernels(opened, 87).get(VARIANTS[0])[1] == cubin(VARIANTS[0], 87)
            assert open_kernels(opened, 120).get(VARIANTS[1])[1] == cubin(VARIANTS[1], 120)
    file.unlink()
    assert "is missing" in refused(bundle).message


@pytest.mark.parametrize("name", [PLAN_FILE, index_file(87)])
def test_a_plan_or_index_that_was_altered(bundle: Path, name: str) -> None:
    data = (bundle / name).read_bytes()
    (bundle / name).write_bytes(data.replace(b"1", b"2", 1))
    problem = refused(bundle)
    assert problem.file == f"{bundle}/{name}" and "SHA-256" in problem.message


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        (PLAN_FILE, b'{"schema_version": 2}', "schema_version"),
        (PLAN_FILE, b"[]", "schema_version"),
        (PLAN_FILE, b'{"variants": []}', "launches"),
        (PLAN_FILE, b'{"variants": [], "variants": []}', None),
        (PLAN_FILE, b"", None),
        (index_file(87), b'{"schema_version": 7, "other": 1}', "schema_version"),
        (index_file(87), b'{"sm": 87, "triton": "3", "ptxas": "1"}', "kernels"),
        (index_file(87), b'{"sm": NaN}', None),
        (index_file(87), b"[" * 5000, None),
        (index_file(87), index(120).to_json(), "sm"),
        (index_file(87), index(87, VARIANTS[:1]).to_json(), "kernels"),
    ],
)
def test_a_plan_or_index_that_says_something_else(
    tmp_path: Path, name: str, content: bytes, field: str | None
) -> None:
    """With the right hash: made by another version, or by someone else."""
    write(tmp_path / "b", lambda writer: writer.path(name).write_bytes(content) and None)
    problem = refused(tmp_path / "b")
    assert problem.file == f"{tmp_path / 'b'}/{name}" and problem.field == field


def test_a_weight_outside_the_weights(tmp_path: Path) -> None:
    for weight in ({"offset": 4, "elements": 250}, {"offset": 1 << 40, "elements": 1}):
        plan = PLAN.model_copy(update={"weights": {"w": Weight(dtype="f32", **weight)}})
        write(tmp_path / "b", lambda w, p=plan: w.path(PLAN_FILE).write_bytes(p.to_json()) and None)
        assert refused(tmp_path / "b").field == "weights.w"


def test_a_cubin_that_the_manifest_does_not_list(bundle: Path) -> None:
    name = f"kernels/sm_87/{VARIANTS[0].key}.cubin"
    (bundle / name).unlink()
    edit_manifest(bundle, lambda m: m.update(files=[f for f in m["files"] if f["path"] != name]))
    problem = refused(bundle)
    assert problem.file == f"{bundle}/{index_file(87)}"
    assert problem.field == f"kernels.{VARIANTS[0].key}.file"


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ({"sm_88": "kernels/sm_88/kernels.json"}, "unknown sm_88; this runtime knows sm_75"),
        ({"87": "kernels/sm_87/kernels.json"}, "this runtime knows"),
        ({"sm_87": "kernels/sm_120/kernels.json"}, "the index of sm_87 is at"),
        ({"sm_75": "kernels/sm_75/kernels.json"}, "kernels.sm_75 'kernels/sm_75/kernels.json'"),
    ],
)
def test_what_a_manifest_may_say_of_kernels(
    bundle: Path, kernels: dict[str, str], said: str
) -> None:
    edit_manifest(bundle, lambda m: m.update(kernels=kernels))
    problem = refused(bundle)
    assert problem.file == f"{bundle}/manifest.json" and said in str(problem)
    edit_manifest(bundle, lambda m: m["graphs"].pop("cuda"))
    edit_manifest(bundle, lambda m: m.update(kernels={"sm_87": index_file(87)}))
    assert says(refused(bundle), "graphs.cuda", "no launch plan")


def test_targets_are_architectures_and_boards() -> None:
    assert architectures([]) == architectures(["cpu"]) == architectures(["CPU,cpu"]) == ()
    assert architectures(["cpu,sm_89", "orin-nano", " SM_87 "]) == (87, 89)
    assert set(NAMES.values()) == set(ARCHITECTURES)
    assert architectures([",".join(NAMES)]) == ARCHITECTURES
    for wrong in ("sm_88", "87", "", "orin", "sm_87;sm_89"):
        with pytest.raises(InputError) as caught:
            architectures([wrong])
        assert caught.value.field == "--target" and describe() in str(caught.value)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return what is compiled, with a compiler that returns stand-ins."""
    found: list[tuple[str, int]] = []

    def compile_it(self: pool.Worker, variant: Variant, sm: int) -> pool.Compiled:
        found.append((variant.key, sm))
        return pool.Compiled(index(sm).kernels[variant.key], "12.9", cubin(variant, sm))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pool.Worker, "compile", compile_it)
    return found


def absent(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_gpu_with_kernels_compiles_nothing(bundle: Path, asked: list[tuple[str, int]]) -> None:
    with open_bundle(bundle) as opened:
        kernels = fallback.kernels_for(opened, PLAN, 87)
        assert kernels.get(VARIANTS[0])[1] == cubin(VARIANTS[0], 87)
    assert asked == []


def test_a_gpu_without_kernels_compiles_once(bundle: Path, asked: list[tuple[str, int]]) -> None:
    for _ in range(2):
        with open_bundle(bundle) as opened:
            kernels = fallback.kernels_for(opened, PLAN, 89)
        assert [kernels.get(v)[1] for v in VARIANTS] == [cubin(v, 89) for v in VARIANTS]
        assert sorted(asked) == sorted((v.key, 89) for v in VARIANTS)


def test_an_index_that_lacks_a_variant_is_left_aside(
    tmp_path: Path, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = index(87, VARIANTS[:1]).to_json()
    write(tmp_path / "b", lambda w: w.path(index_file(87)).write_bytes(short) and None)
    with open_bundle(tmp_path / "b") as opened:
        kernels = fallback.kernels_for(opened, PLAN, 87)
        assert kernels.get(VARIANTS[1])[1] == cubin(VARIANTS[1], 87) and len(asked) == 2
        monkeypatch.setattr(importlib.metadata, "version", absent)
        with pytest.raises(BundleError, match="which the plan launches"):
            fallback.kernels_for(opened, PLAN, 87).get(VARIANTS[1])


def test_without_triton_a_missing_architecture_is_told(
    bundle: Path, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", absent)
    with open_bundle(bundle) as opened, pytest.raises(BundleError) as caught:
        fallback.kernels_for(opened, PLAN, 89)
    assert caught.value.field == "kernels.sm_89" and asked == []


def test_damage_is_not_repaired_by_compiling(bundle: Path, asked: list[tuple[str, int]]) -> None:
    (bundle / index_file(87)).write_bytes(index(87).to_json()[:-1] + b" ")
    with open_bundle(bundle) as opened, pytest.raises(BundleError, match="SHA-256"):
        fallback.kernels_for(opened, PLAN, 87)
    assert asked == []


def test_a_kernel_that_cannot_be_compiled_here(tmp_path: Path) -> None:
    wrong = VARIANTS[0].model_copy(update={"kernel": "rounding.nothing"})
    with pytest.raises(EngineError, match="no such kernel") as caught:
        fallback.compiled_here([wrong], 87)
    assert caught.value.field == "rounding.nothing"
