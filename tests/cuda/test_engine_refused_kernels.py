"""A driver that refuses a bundle's cubins: they are compiled here, where that is possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge.bundle import open_bundle
from edge.errors import EngineError
from edge.launch import CompiledKernel, Variant
from edge.plugins.compiler import fallback
from edge.plugins.compiler.interpreter import InterpretDevice
from edge.runtime.cuda import opening

pytestmark = pytest.mark.without_gpu

DEMO = Path(opening.__file__).parents[2] / "apps" / "bundles" / "demo-draft"


class PickyDevice(InterpretDevice):
    """Accepts only the cubin `here`."""

    sm = 87

    def load(self, variant: Variant, compiled: CompiledKernel | None, cubin: bytes) -> Any:
        if cubin != b"here":
            raise EngineError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        return super().load(variant, compiled, cubin)


class Source:
    def __init__(self, cubin: bytes) -> None:
        self.cubin = cubin

    def get(self, variant: Variant) -> tuple[None, bytes]:
        return None, self.cubin


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def source(name: str, cubin: bytes) -> Any:
        return lambda *_: asked.append(name) or Source(cubin)

    monkeypatch.setattr(fallback, "kernels_for", source("bundle", b"foreign"))
    monkeypatch.setattr(fallback, "compiled_here", source("here", b"here"))
    return asked


def test_refused_kernels_are_compiled_here(sources: list[str]) -> None:
    with open_bundle(DEMO) as bundle:
        engine = opening.from_bundle(bundle, PickyDevice())
    assert sources == ["bundle", "here"]
    assert len(engine.executor.kernels) == len(engine.plan.variants)


def test_without_triton_the_drivers_refusal_is_told(
    sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "can_compile", lambda: False)
    with open_bundle(DEMO) as bundle, pytest.raises(EngineError, match="NO_BINARY_FOR_GPU"):
        opening.from_bundle(bundle, PickyDevice())
    assert sources == ["bundle"]
