"""The CUDA engine with Triton's own cubins, over the real cuda-core on a fake driver.

The kernels do not run. The tests check that launches match the cubins' parameters, that a step is
one graph launch, and how errors in the middle of a model are handled.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.config import ModelConfig
from edge.errors import EdgeError, EngineError
from edge.launch import CompiledKernel, LaunchPlan
from tests.cuda.fake_driver import ran, scenario

pytestmark = pytest.mark.without_gpu

SM = 87
FOLDER = "EDGE_TEST_PARTS"


@pytest.fixture(scope="module", autouse=True)
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Export and compile the model once, into a folder that every scenario opens."""
    pytest.importorskip("triton", reason="triton is not installed")
    from edge.plugins.compiler.aot import compile_variants
    from edge.plugins.lowering.plan import lower
    from tests import quantized_models

    name = "mamba1"  # whose kernels tests/test_kernels_aot.py compiles, too
    _, mixed = quantized_models.plan_of(name, "w8a8")
    folder = tmp_path_factory.mktemp("parts")
    built = quantized_models.built(name, mixed, folder)
    plan = lower(built.graph.read_bytes(), folder)
    kernels = compile_variants(plan.variants, [SM])[SM]
    (folder / "config").write_text(quantized_models.network(name).config.model_dump_json())
    (folder / "plan").write_text(plan.model_dump_json())
    (folder / "dtypes").write_text(json.dumps(dict(built.state_dtypes)))
    for index, each in enumerate(plan.variants):
        kernel, cubin = kernels.get(each)
        (folder / f"{index}.kernel").write_text(kernel.model_dump_json())
        (folder / f"{index}.cubin").write_bytes(cubin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        yield


def _engine() -> Any:
    from edge.runtime.cuda.core import CoreDevice
    from edge.runtime.cuda.device import Exclusive
    from edge.runtime.cuda.engine import CudaEngine
    from edge.runtime.cuda.launching import PlanExecutor
    from edge.runtime.cuda.weights import DeviceWeights
    from edge.runtime.layout import Identity

    folder = Path(os.environ[FOLDER])

    def read(name: str) -> str:
        return (folder / name).read_text()

    plan = LaunchPlan.model_validate_json(read("plan"))
    device = CoreDevice(limit_s=30)
    exclusive = Exclusive(device)
    weights = DeviceWeights(plan, exclusive)
    weights.read([(folder / "weights.bin").read_bytes()])
    loaded = {}
    for index, each in enumerate(plan.variants):
        kernel = CompiledKernel.model_validate_json(read(f"{index}.kernel"))
        loaded[index] = device.load(each, kernel, (folder / f"{index}.cubin").read_bytes())
    engine = CudaEngine(
        ModelConfig.model_validate_json(read("config")), exclusive,
        PlanExecutor(plan, loaded, weights, device),
        chunk=48, identity=Identity("test"), state_dtypes=json.loads(read("dtypes")),
    )  # fmt: skip
    launches = {program.kind: len(program.launches) for program in reversed(plan.programs)}
    return engine, launches


def _seen() -> Counter[str]:
    """Count the driver calls since the last time, by the log's first word."""
    log = Path(os.environ["FAKE_CUDA_LOG"])
    lines = log.read_text().splitlines()
    log.write_text("")
    return Counter(line.split()[0] for line in lines)


@scenario()
def verbs() -> Any:
    engine, launches = _engine()
    state = engine.new_state(window=4, capacity=64)
    out = {"load": _seen()}

    def run(name: str, tokens: list[int], **options: Any) -> None:
        engine.run(np.array([tokens]), state, **options)
        out[name] = _seen()

    run("step", [1])
    run("again", [2])
    run("three", [1, 2, 3], rows="all")
    state.rewind(2)
    run("rewound", [1])
    run("tree", [1, 2, 3], parents=[-1, 0, 0], rows="all")
    state.select(1)
    run("chunk", list(range(9)) * 5, commit=True)
    state.restore(state.snapshot())
    run("restored", [1])
    return {"launches": launches, "seen": out}


def test_a_step_is_one_launch_and_allocates_nothing() -> None:
    done = ran(verbs)
    seen, launches = done.result["seen"], done.result["launches"]
    assert seen.pop("load")["launch"] > 0  # recorded, not run
    chunk = seen.pop("chunk")
    for name, calls in seen.items():
        kind = "tree" if name == "tree" else "chain"
        assert calls == {"replay": 1, "run": launches[kind]}, name
    assert "replay" not in chunk and chunk["launch"] == chunk["run"]
    assert not {"alloc", "host"} & set(chunk)
    assert done.live == {**dict.fromkeys(done.live, 0), "libraries": done.live["libraries"]}


@scenario({"fail": "cuGraphLaunch:2:700"}, {"fail": "cuMemAlloc:3:2"})
def faulty() -> Any:
    engine, _ = _engine()
    said = []
    for _ in range(4):
        try:
            state = engine.new_state(window=2, capacity=16)
            engine.run(np.array([[1]]), state)
            said.append("ran")
        except EdgeError as error:
            said.append(f"{type(error).__name__}: {error}")
    return {"said": said, "lost": engine.exclusive.device.lost}


def test_an_illegal_address_in_a_step_ends_the_engine_and_not_the_process() -> None:
    done = ran(faulty, fail="cuGraphLaunch:2:700")
    first, second, *later = done.result["said"]
    assert first == "ran"
    assert second.startswith(EngineError.__name__) and "CUDA_ERROR_ILLEGAL_ADDRESS" in second
    assert all("the device is lost" in text for text in later)
    assert done.result["lost"]
    assert done.stderr == ""


def test_no_memory_for_a_state_is_told_and_passes() -> None:
    done = ran(faulty, fail="cuMemAlloc:3:2")
    first, *later = done.result["said"]
    assert "no room" in first
    assert later == ["ran"] * 3
    assert done.result["lost"] is None
