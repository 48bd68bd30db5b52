"""TensorRT for RTX builds the body of every device op: its demands on types and shapes."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from onnx import ModelProto

from edge.errors import EngineError
from edge.plugins.device.statements import DEVICE_OPS
from edge.plugins.tensorrt.graph import inlined
from edge.runtime.tensorrt import bindings
from tests.device_ops import Case

# smallest, usual and largest value of the dimensions that vary between runs
RANGES = {"T": (1, 1, 64), "L": (1, 1, 64), "P": (1, 1, 32), "A": (1, 1, 64), "B": (1, 1, 2)}
GPUS = ("SM86", "SM89")


def rtx() -> Any:
    """Return the module of TensorRT for RTX, or None if it is not installed."""
    try:
        return bindings.load("rtx").module
    except EngineError:
        return None


RTX = rtx()
pytestmark = pytest.mark.skipif(RTX is None, reason=f"no TensorRT for RTX: {bindings.RTX_COMMAND}")


@pytest.fixture(scope="module")
def log() -> Any:
    """Keeps TensorRT's messages; one for all, because it keeps the first logger it gets."""

    class Log(RTX.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= RTX.ILogger.ERROR:
                self.errors.append(message)

    return Log()


def engine_of(model: ModelProto, log: Any, gpu: str) -> bytes:
    """Return an engine, built ahead of time for `gpu`."""
    log.errors.clear()
    builder = RTX.Builder(log)
    network = builder.create_network(1 << int(RTX.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = RTX.OnnxParser(network, log)
    assert parser.parse(model.SerializeToString()), log.errors
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(RTX.ComputeCapability, gpu), 0)
    profile = builder.create_optimization_profile()
    for value in model.graph.input:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        bounds = [[RANGES[d][at] if isinstance(d, str) else d for d in dims] for at in range(3)]
        profile.set_shape(value.name, *bounds)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None, log.errors
    return bytes(engine)


def bodies() -> list[str]:
    """Return all device ops. A scan has a type of state, B and C of groups or not, and for Mamba-1
    dt ready or not. Of Mamba-1's forms, those in which each two of the three choices meet; of
    Mamba-2's, each type of state once and both choices of groups: a body is put together from
    a part for each choice.
    """
    scans = re.compile("SelectiveScan(Heads|Groups)?(?:Int8_(8|16|32))?(_1)?(Dt)?")
    found = []
    for name in DEVICE_OPS:
        scan = scans.fullmatch(name)
        choices = scan and (scan[1] == "Groups") + bool(scan[3]) + bool(scan[4])
        left_out = scan and (choices + (scan[2] in ("8", "32"))) % 2
        found += [] if left_out else [name]
    return found


@pytest.mark.parametrize(("name", "gpu"), [*zip(bodies(), itertools.cycle(GPUS), strict=False)])
def test_a_body_is_built(name: str, gpu: str, log: Any) -> None:
    """With scales per channel where possible: a single scale is easier for TensorRT."""
    case = Case(name, channels=True)
    assert engine_of(inlined(case.model()), log, gpu)
