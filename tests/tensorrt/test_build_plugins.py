"""What `edge build` asks of TensorRT with plugins: the order of calls, and differences by version.

TensorRT's builder needs a GPU, so `builder_stub` stands in. That a builder makes an engine is shown
by `test_build_rtx.py` without plugins; with plugins it takes a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.bundle import Bundle, open_bundle
from edge.errors import EngineError
from edge.plugins.tensorrt import blob
from edge.runtime import memory
from edge.runtime.model import resolve
from edge.runtime.tensorrt import build, cache, machine, sealed
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.compile import Order
from edge.runtime.tensorrt.profiles import EngineSizes
from tests.facts import says
from tests.tensorrt.builder_stub import GIVEN, MEASURED, Seen, module

SIZES = EngineSizes(window=4, batch=2, capacity=64, chunk=16)
KERNELS = blob.pack(87, {})
FREE = 4 << 30


class Library:
    """The plugin library's part: the calls it receives, in order."""

    digest = "d" * 64

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self.told: list[tuple[bytes, bool, bool]] = []

    def prepare(self, kernels: bytes, *, aliased: bool) -> None:
        self.told.append((kernels, aliased, bool(self._seen.model.graph.node)))

    def last_error(self) -> str:
        return "kernel k is not there"


class Gpu:
    name, sm, integrated = "GPU 0 (Orin)", 87, True
    free = FREE

    def memory(self) -> tuple[int, int]:
        return self.free, self.free


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "kernels_of", lambda *_: KERNELS)
    monkeypatch.setattr(memory, "available_bytes", lambda: FREE)


@pytest.fixture
def bundle() -> Iterator[Bundle]:
    with open_bundle(resolve("demo")) as opened:
        yield opened


def made(
    bundle: Bundle, seen: Seen, version: tuple[int, ...] = (10, 3, 0), **how: Any
) -> tuple[build.Built, Library]:
    library: Any = Library(seen)
    trt = TensorRT("tensorrt", module(seen), version)
    return build.build(bundle, Order(SIZES, **how), trt, library, Gpu()), library


@pytest.mark.parametrize(("version", "flags"), [((10, 3, 0), 2), ((10, 16, 1), 2), ((11, 4, 0), 0)])
def test_a_version_gets_what_it_can_read(
    bundle: Bundle, version: tuple[int, ...], flags: int
) -> None:
    seen = Seen()
    built, _ = made(bundle, seen, version)
    assert seen.network_flags == flags
    assert not seen.model.functions
    assert built.components["tensorrt"] == ".".join(map(str, version))
    assert seen.weights == bundle.read("weights.bin")
    assert seen.cleared == {"TF32"} and seen.progress == [True, True]


def test_the_library_has_the_kernels_while_the_graph_is_parsed_and_not_after(
    bundle: Bundle,
) -> None:
    for aliased in (True, False):
        seen = Seen()
        built, library = made(bundle, seen, aliased=aliased, force=True)
        assert library.told == [(KERNELS, aliased, False), (b"", False, True)]
        assert seen.previews == ({"aliased": True} if aliased else {})
        assert built.components["flags"] == ("aliased," if aliased else "") + "workspace=256"


def test_profiles_and_limits(bundle: Bundle) -> None:
    seen = Seen()
    made(bundle, seen, workspace=100)
    assert seen.pools == {"workspace": 100 << 20, "tactics": FREE // 2}
    step, verify, prefill = seen.profiles
    assert step["tokens"] == ((1, 1), (1, 2), (1, 2))
    assert verify["tokens"] == ((2, 1), (4, 2), (4, 2))
    assert verify["ancestors"] == ((1, 1), (4, 4), (4, 4))
    assert prefill["tokens"] == ((1, 1), (16, 2), (16, 2))
    assert prefill["ancestors"] == ((1, 1),) * 3
    assert step["layers.0.conv_in"][2][:2] == (8, 2)
    caches = [shapes for name, shapes in step.items() if name.endswith(".key_cache")]
    assert caches and all(most[2] == 64 for _, _, most in caches)


def test_what_is_built_is_found_on_the_same_machine_alone(bundle: Bundle) -> None:
    seen = Seen()
    built, library = made(bundle, seen)
    trt = TensorRT("tensorrt", module(seen), (10, 3, 0))
    here = machine.components(bundle, trt, library, Gpu())  # type: ignore[arg-type]
    with cache.find("demo", here, SIZES) as found:
        assert found.path == built.path and bytes(found.body).startswith(b"engine of ")
    assert built.components["kernels"] == blob.identity(KERNELS)
    assert (built.components["sm"], built.components["gpu"]) == ("87", "Orin")
    with pytest.raises(EngineError, match="the GPU's architecture was 87, is 89"):
        cache.find("demo", here | {"sm": "89"}, SIZES)


def test_timings_are_given_back(bundle: Bundle) -> None:
    first, second = Seen(), Seen()
    made(bundle, first)
    assert first.timings == b""
    made(bundle, second, force=True)
    assert second.timings == GIVEN + MEASURED


def test_timings_that_the_builder_refuses_are_left(bundle: Bundle) -> None:
    made(bundle, Seen())
    seen = Seen(refuses=GIVEN + MEASURED)
    built, _ = made(bundle, seen, force=True)
    assert seen.timings == b"" and built.seconds > 0


def test_timings_that_cannot_be_kept_are_a_note(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise EngineError("the disk is full")

    monkeypatch.setattr(cache, "write_timings", refuse)
    built, _ = made(bundle, Seen())
    (note,) = built.notes
    assert says(note, "timing cache", "the disk is full")
    assert built.path.exists()


def test_a_build_that_fails_says_what_tensorrt_and_the_library_said(bundle: Bundle) -> None:
    with pytest.raises(EngineError) as caught:
        made(bundle, Seen(builds=False))
    assert "no tactic for layers.0" in caught.value.message
    assert "kernel k is not there" in caught.value.message
    assert caught.value.remedy is not None and "--chunk" in caught.value.remedy
    assert not list(sealed.folder().glob("*.engine"))


def test_a_gpu_with_memory_of_its_own_is_asked_for_it(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gpu, "free", 500 << 20)
    made(bundle, Seen())
    monkeypatch.setattr(Gpu, "integrated", False)
    with pytest.raises(EngineError, match="500 MiB are available"):
        made(bundle, Seen(), force=True)
