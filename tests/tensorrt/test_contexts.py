"""Execution contexts: what TensorRT receives, how its refusals are reported, and that its names
exist.
"""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from types import ModuleType
from typing import Any

import pytest

from edge.errors import EngineError
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.contexts import EngineContexts, GraphRun
from edge.runtime.tensorrt.profiles import EngineSizes, profiles
from tests.cuda.models import tokens
from tests.facts import facts
from tests.tensorrt import ort_tensorrt
from tests.tensorrt.engines import native, tensorrt_engine, trio

_REAL = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings", "tensorrt_lean_bindings")


@pytest.fixture(params=_REAL)
def real(request: pytest.FixtureRequest) -> ModuleType:
    """Return each installed TensorRT."""
    return pytest.importorskip(request.param, reason=f"{request.param} is not installed")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ort_tensorrt.Execution, "IExecutionContext"),
        (ort_tensorrt.Engine, "ICudaEngine"),
        (ort_tensorrt.ILogger, "ILogger"),
        (ort_tensorrt.IErrorRecorder, "IErrorRecorder"),
        (ort_tensorrt.TensorIOMode, "TensorIOMode"),
        (ort_tensorrt.TensorLocation, "TensorLocation"),
        (ort_tensorrt.ExecutionContextAllocationStrategy, "ExecutionContextAllocationStrategy"),
    ],
)
def test_what_the_tests_speak_is_what_tensorrt_speaks(
    real: ModuleType, ours: Any, theirs: str
) -> None:
    """Every method that the runtime calls exists, with the parameters it passes, by position."""
    other = getattr(real, theirs)
    own = {"ports", "inputs", "outputs", "profiles", "device", "perform", "name", "value", "told",
           "refused"}  # fmt: skip
    for name in [each for each in vars(ours) if not each.startswith("_") and each not in own]:
        method = getattr(ours, name)
        assert hasattr(other, name), f"{theirs}.{name}"
        text = str(getattr(other, name).__doc__ or "")
        signatures = re.findall(rf"{name}\(self: [^,)]+(?:, )?(.*?)\) -> ", text)
        if inspect.isfunction(method) and signatures:
            wanted = list(inspect.signature(method).parameters)[1:]
            # some have no names there, only numbers
            nameless = [f"arg{index}" for index in range(len(wanted))]
            offered = [re.findall(r"(\w+): ", each)[: len(wanted)] for each in signatures]
            assert wanted in offered or nameless in offered, (name, offered)


def test_an_engine_that_the_real_library_refuses(real: ModuleType) -> None:
    if "rtx" not in real.__name__:
        pytest.skip("TensorRT's own runtime needs a driver to say more than no")
    trt = TensorRT("rtx", real, (1, 0, 0))
    with pytest.raises(EngineError, match=r"[Ss]erialization") as info:
        EngineContexts(
            trt, b"no engine at all" * 20, ort_tensorrt.Stream(), profiles(EngineSizes())
        )
    assert "edge build" in str(info.value.remedy)


def test_an_engine_that_is_refused() -> None:
    device = ort_tensorrt.Stream()
    trt = TensorRT("tensorrt", ort_tensorrt.module(device), (10, 3, 0))
    with pytest.raises(EngineError, match="magic tag; kernels differ"):
        EngineContexts(trt, b"?", device, profiles(EngineSizes()), lambda: "kernels differ")


def test_an_engine_that_wants_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trio("mamba1", "fp32")
    host = ort_tensorrt.TensorLocation.HOST
    monkeypatch.setattr(ort_tensorrt.Engine, "get_tensor_location", lambda *_: host)
    with pytest.raises(EngineError, match=facts("host memory", "device graph")):
        tensorrt_engine(made.cuda, made.graph, "tensorrt")


def test_refusals_in_a_run_leave_the_state_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trio("mamba1", "fp32")
    engine = tensorrt_engine(made.cuda, made.graph, "tensorrt")
    state = engine.new_state(window=2)
    engine.run(tokens(5, seed=1), state, commit=True)
    before = state.arrays()
    execute = ort_tensorrt.Execution.execute_async_v3
    refused = ort_tensorrt.Execution.refused

    monkeypatch.setattr(
        ort_tensorrt.Execution, "execute_async_v3", lambda self, _: refused(self, "no kernel image")
    )
    with pytest.raises(EngineError, match="no kernel image"):
        engine.run(tokens(6, seed=2), state, commit=True)
    with pytest.raises(EngineError, match="does not say why"):
        monkeypatch.setattr(ort_tensorrt.Execution, "execute_async_v3", lambda *_: False)
        engine.run(tokens(6, seed=2), state, commit=True)

    def raises(*_: object) -> bool:
        raise RuntimeError("CUDA error")

    with pytest.raises(EngineError, match="CUDA error"):
        monkeypatch.setattr(ort_tensorrt.Execution, "execute_async_v3", raises)
        engine.run(tokens(6, seed=2), state, commit=True)
    monkeypatch.setattr(ort_tensorrt.Execution, "execute_async_v3", execute)
    assert state.position == 5
    for name, array in state.arrays().items():
        assert (array == before[name]).all(), name


def test_shapes_and_addresses_that_are_refused() -> None:
    made = trio("mamba1", "fp32")
    engine = tensorrt_engine(made.cuda, made.graph, "tensorrt")
    state = engine.new_state(window=2)
    engine.run(tokens(7), state, commit=True)
    contexts, found = engine.executor.contexts, native(engine)  # type: ignore[attr-defined]
    bound = state.workspace.prepared_run(state.workspace.runs.key("chain", 7, 1)).work.bound
    run: GraphRun = bound.run
    with pytest.raises(EngineError, match=facts("no profile", "T 49")):
        contexts.bound(run._replace(symbols={**run.symbols, "T": 49}), own=False)
    wide = run._replace(shapes={**run.shapes, "tokens": (7, 9)})
    with pytest.raises(EngineError, match=r"tokens .*\(7, 9\)"):
        contexts.bound(wide, own=True).enqueue()
    odd = run._replace(addresses={**run.addresses, "logits": run.addresses["logits"] + 4})
    with pytest.raises(EngineError, match="setting the address of logits failed"):
        contexts.bound(odd, own=True).enqueue()
    count = len(found.ran)
    bound.enqueue()
    assert len(found.ran) == count + 1


def test_nothing_waits_for_the_garbage_collector() -> None:
    """Contexts are freed with their state, the rest with the engine."""
    made = trio("mamba1", "fp32")
    engine = tensorrt_engine(made.cuda, made.graph, "tensorrt")
    state = engine.new_state(window=1)
    for count in (1, 3):
        engine.run(tokens(count), state, commit=True)
    ready = state.workspace.prepared_run
    own, shared = (ready(state.workspace.runs.key("chain", n, 1)).work.bound for n in (1, 3))
    held, kept = own.context.held, shared.context.held
    contexts = weakref.ref(engine.executor.contexts)  # type: ignore[attr-defined]
    assert held[0] in native(engine).contexts
    gc.collect()
    gc.disable()
    try:
        del state, ready, own, shared
        assert held == [] and len(kept) == 1
        del engine
        assert contexts() is None and kept == []
    finally:
        gc.enable()
