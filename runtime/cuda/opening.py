"""Opens a bundle as a CUDA engine: selects the device, loads kernels and weights."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edge.bundle.kernels import open_plan
from edge.bundle.reader import WEIGHT_FILE
from edge.errors import EngineError
from edge.launch import LaunchPlan
from edge.runtime.cuda.device import Device, Exclusive
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.sliding import sliding
from edge.runtime.cuda.weights import DeviceWeights, upload
from edge.runtime.layout import Identity

if TYPE_CHECKING:
    from edge.bundle import Bundle

CHUNK = 512  # tokens of a prompt's run on a GPU with memory of its own
DEVICE_VARIABLE = "EDGE_DEVICE"
INTERPRET = "interpret"


def from_bundle(
    bundle: Bundle,
    device: Device | None = None,
    kind: type[CudaEngine] = CudaEngine,
    plan: LaunchPlan | None = None,
) -> CudaEngine:
    """Open the engine of a bundle.

    Args:
        device: device to run on; None selects it by EDGE_DEVICE.
        kind: class of the engine.
        plan: the bundle's launch plan if it is already open.

    Raises BundleError for a missing plan, missing kernels or an altered file, EngineError for a
    missing device or too little memory.
    """
    plan = sliding(open_plan(bundle) if plan is None else plan)
    device = open_device() if device is None else device
    exclusive, manifest = Exclusive(device), bundle.manifest
    return kind(
        manifest.model,
        exclusive,
        load_executor(bundle, plan, exclusive, plan, range(len(plan.variants))),
        chunk=_chunk(manifest.limits.chunk, device),
        identity=Identity.of_bundle(bundle),
        state_dtypes=manifest.state_dtypes,
    )


def _chunk(limit: int, device: Device) -> int:
    """Return the tokens of a prompt's run: `limit`, or CHUNK if that is more and the GPU large.

    There, launches and latency make a run of 128 tokens take half as long as one of 512. A GPU that
    shares the CPU's memory has few multiprocessors: it gains little, and would be cancelled late.
    """
    return limit if getattr(device, "integrated", True) else max(limit, CHUNK)


def load_executor(
    bundle: Bundle, plan: LaunchPlan, exclusive: Exclusive, part: LaunchPlan, wanted: Sequence[int]
) -> PlanExecutor:
    """Return an executor of the plan with the constants of `part`, which may have fewer, and the
    `wanted` kernels, given by variant index. Raises as `from_bundle` does.
    """
    kernels = load_kernels(bundle, plan, exclusive.device, exclusive, wanted)
    weights = DeviceWeights(part, exclusive)
    if part.weights:
        upload(bundle, WEIGHT_FILE, weights)
    return PlanExecutor(plan, kernels, weights, exclusive.device)


def open_device() -> Device:
    """Open the device that EDGE_DEVICE names: "interpret" or a GPU number.

    Without EDGE_DEVICE, open the GPU of the current context, else the first GPU.

    Raises EngineError if the device, its driver or its packages are missing.
    """
    name = os.environ.get(DEVICE_VARIABLE, "")
    if name == INTERPRET:
        # imported only on request: it needs Triton, which reads this variable when imported
        if "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
        try:
            module = importlib.import_module("edge.plugins.compiler.interpreter")
        except ImportError as problem:
            raise _device_error(name, f"cannot import the interpreter: {problem}") from problem
        interpreter: Device = module.InterpretDevice()
        return interpreter
    if name and not name.isdecimal():
        raise _device_error(name, f"is {name!r:.40}, neither a number nor {INTERPRET!r}")
    from edge.runtime.cuda.core import CoreDevice

    return CoreDevice(int(name) if name else None)


def _device_error(name: str, message: str) -> EngineError:
    return EngineError(
        message, field=DEVICE_VARIABLE, remedy="unset it, or give the number of a GPU: 0, 1, …"
    )


def load_kernels(
    bundle: Bundle, plan: LaunchPlan, device: Device, exclusive: Exclusive, wanted: Sequence[int]
) -> dict[int, Any]:
    """Load the `wanted` kernels by variant index: from the bundle, or compiled here with Triton.

    Raises BundleError if there are none for this device, EngineError if the device refuses them.
    """
    variants = {index: plan.variants[index] for index in wanted}
    if device.sm == 0:
        return {i: device.load(variant, None, b"") for i, variant in variants.items()}
    # imported by name: the compiler is not part of the runtime
    fallback: Any = importlib.import_module("edge.plugins.compiler.fallback")
    part = plan.model_copy(update={"variants": tuple(variants.values())})

    def load_all(source: Any) -> dict[int, Any]:
        with exclusive:
            return {
                i: device.load(variant, *source.get(variant)) for i, variant in variants.items()
            }

    try:
        return load_all(fallback.kernels_for(bundle, part, device.sm))
    except EngineError:
        # a driver too old for the ptxas that built the bundle may still accept the local one
        if not fallback.can_compile():
            raise
        return load_all(fallback.compiled_here(part.variants, device.sm))
