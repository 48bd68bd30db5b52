"""From a bundle to the CUDA engine: what is loaded, checked and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.bundle import BundleWriter, Limits, open_bundle
from edge.bundle.kernels import PLAN_FILE, index_file
from edge.errors import BundleError, EngineError, InputError
from edge.launch import CompiledKernel, KernelIndex, Variant
from edge.plugins.compiler import fallback
from edge.plugins.compiler.interpreter import InterpretDevice
from edge.runtime.cuda import opening
from edge.runtime.cuda.opening import from_bundle
from edge.runtime.engines import open_engine
from edge.runtime.layout import Identity
from tests.cuda import toy
from tests.test_bundle import FIELDS

pytestmark = pytest.mark.without_gpu


class Gpu(InterpretDevice):
    """An interpreter that reports itself as a GPU and keeps what it is asked to load."""

    sm = 87

    def __init__(self) -> None:
        super().__init__(toy.PACKAGE)
        self.loaded: dict[str, bytes] = {}
        self.integrated = True

    def load(self, variant: Variant, compiled: CompiledKernel | None, cubin: bytes) -> Any:
        assert compiled is not None
        self.loaded[compiled.symbol] = cubin
        return super().load(variant, compiled, cubin)


def write(folder: Path, *, kernels: bool = False) -> Path:
    plan = toy.plan()
    with BundleWriter(folder) as writer:
        writer.path(PLAN_FILE).write_bytes(plan.to_json())
        writer.path("weights.bin").write_bytes(b"\0" * 64 + toy.TABLE.tobytes())
        fields = {**FIELDS, "model": toy.CONFIG, "graphs": {"cuda": PLAN_FILE}}
        if kernels:
            compiled = {
                each.key: CompiledKernel(
                    file=f"{each.key}.cubin", symbol=each.kernel, shared_bytes=0, scratch=0
                )
                for each in plan.variants
            }
            index = KernelIndex(sm=87, triton="3.9", ptxas="13", kernels=compiled)
            writer.path(index_file(87)).write_bytes(index.to_json())
            for each in plan.variants:
                writer.path(f"kernels/sm_87/{each.key}.cubin").write_bytes(each.kernel.encode())
            fields["kernels"] = {"sm_87": index_file(87)}
        writer.finish(**{**fields, "limits": Limits(chunk=20)})
    return folder


def answers(engine: Any) -> None:
    found = engine.run(np.array([[1, 2, 3]]), engine.new_state(window=3), rows="all")
    assert np.array_equal(found[0], toy.expected([1, 2, 3])[0])


def test_a_bundle_interpreted(tmp_path: Path) -> None:
    with open_bundle(write(tmp_path / "b")) as bundle:
        engine = from_bundle(bundle, InterpretDevice(toy.PACKAGE))
        assert engine.identity == Identity.of_bundle(bundle)
    assert engine.chunk == 20
    answers(engine)


@pytest.mark.parametrize(("integrated", "chunk"), [(False, opening.CHUNK), (True, 20)])
def test_a_gpu_with_its_own_memory_reads_prompts_in_long_runs(
    integrated: bool, chunk: int, tmp_path: Path
) -> None:
    device = Gpu()
    device.integrated = integrated
    with open_bundle(write(tmp_path / "b", kernels=True)) as bundle:
        engine = from_bundle(bundle, device)
    assert engine.chunk == chunk
    ids, state = np.arange(40) % len(toy.TABLE), engine.new_state(window=3)
    if integrated:
        with pytest.raises(InputError, match="chunk"):
            engine.run(ids[None], state, commit=True)
        return
    found = engine.run(ids[None], state, commit=True)
    assert np.array_equal(found[0, 0], toy.expected(ids)[0][-1])


def test_the_engine_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EDGE_DEVICE selects the device; its kernels are looked up in the usual folder, which lacks
    them.
    """
    monkeypatch.setenv("EDGE_DEVICE", "interpret")
    with (
        open_bundle(write(tmp_path / "b")) as bundle,
        pytest.raises(EngineError, match=r"unknown kernel toy_kernels\.embed"),
    ):
        open_engine(bundle, "cuda")


def test_the_bundles_own_kernels(tmp_path: Path) -> None:
    device = Gpu()
    with open_bundle(write(tmp_path / "b", kernels=True)) as bundle:
        answers(from_bundle(bundle, device))
    assert device.loaded == {each.kernel: each.kernel.encode() for each in toy.plan().variants}


def test_kernels_compiled_when_the_bundle_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made:
        def get(self, variant: Variant) -> tuple[CompiledKernel, bytes]:
            symbol = variant.kernel
            return CompiledKernel(file="x", symbol=symbol, shared_bytes=0, scratch=0), b"made"

    monkeypatch.setattr(fallback, "compile_variants", lambda *_: {87: Made()})
    device = Gpu()
    with open_bundle(write(tmp_path / "b")) as bundle:
        answers(from_bundle(bundle, device))
    assert set(device.loaded.values()) == {b"made"}


def test_no_kernels_and_no_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "can_compile", lambda: False)
    with (
        open_bundle(write(tmp_path / "b")) as bundle,
        pytest.raises(BundleError, match="no kernels for sm_87") as caught,
    ):
        from_bundle(bundle, Gpu())
    assert "--target sm_87" in str(caught.value.remedy)


def test_weights_that_change_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "b")
    with open_bundle(folder) as bundle:
        bundle.fd("weights.bin")  # checked now, and altered under the same name afterwards
        with (folder / "weights.bin").open("r+b") as file:
            file.write(b"\1")
        with pytest.raises(BundleError, match="changed while it was read"):
            from_bundle(bundle, InterpretDevice(toy.PACKAGE))


def test_no_plan(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b") as writer:
        writer.path("graphs/ort.onnx").write_bytes(b"graph")
        writer.finish(**FIELDS)
    with (
        open_bundle(tmp_path / "b") as bundle,
        pytest.raises(BundleError, match="no launch plan"),
    ):
        from_bundle(bundle, InterpretDevice(toy.PACKAGE))


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edge.runtime.cuda import install

    monkeypatch.delenv("EDGE_DEVICE", raising=False)
    monkeypatch.setattr(install, "driver_version", lambda: None)
    with (
        open_bundle(write(tmp_path / "b")) as bundle,
        pytest.raises(EngineError, match="no NVIDIA driver"),
    ):
        open_engine(bundle, "cuda")
