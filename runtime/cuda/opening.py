"""Makes a running engine of a bundle: the device, its kernels, the weights."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edge.bundle.kernels import WEIGHT_FILE, open_plan
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

DEVICE_VARIABLE = "EDGE_DEVICE"
INTERPRET = "interpret"


def from_bundle(
    bundle: Bundle,
    device: Device | None = None,
    kind: type[CudaEngine] = CudaEngine,
    plan: LaunchPlan | None = None,
) -> CudaEngine:
    """The engine for a bundle; `device` None is the one EDGE_DEVICE means. `kind`: its class;
    `plan`: the bundle's, where it was opened before.

    Raises BundleError: no plan, no kernels for this device, an altered file; EngineError: no
    device, no memory.
    """
    plan = sliding(open_plan(bundle) if plan is None else plan)
    device = open_device() if device is None else device
    exclusive, manifest = Exclusive(device), bundle.manifest
    return kind(
        manifest.model,
        exclusive,
        load_executor(bundle, plan, exclusive, plan, range(len(plan.variants))),
        chunk=manifest.limits.chunk,
        identity=Identity.of_bundle(bundle),
        state_dtypes=manifest.state_dtypes,
    )


def load_executor(
    bundle: Bundle, plan: LaunchPlan, exclusive: Exclusive, part: LaunchPlan, wanted: Sequence[int]
) -> PlanExecutor:
    """An executor of the plan with the constants of `part`, which may be fewer, and the `wanted`
    kernels. Raises as `from_bundle` does.
    """
    kernels = load_kernels(bundle, plan, exclusive.device, exclusive, wanted)
    weights = DeviceWeights(part, exclusive)
    if part.weights:
        upload(bundle, WEIGHT_FILE, weights)
    return PlanExecutor(plan, kernels, weights, exclusive.device)


def open_device() -> Device:
    """The device that EDGE_DEVICE names: "interpret", or the number of a GPU.

    Without it, the GPU of the context that is current, else the first.

    Raises EngineError: no such device, or nothing to drive it with.
    """
    name = os.environ.get(DEVICE_VARIABLE, "")
    if name == INTERPRET:
        # never imported by the runtime itself: it needs Triton, which looks at this when it is
        if "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
        try:
            module = importlib.import_module("edge.plugins.compiler.interpreter")
        except ImportError as problem:
            raise _not_a_device(name, f"cannot be interpreted on: {problem}") from problem
        interpreter: Device = module.InterpretDevice()
        return interpreter
    if name and not name.isdecimal():
        raise _not_a_device(name, f"is {name!r:.40}, neither a number nor {INTERPRET!r}")
    from edge.runtime.cuda.core import CoreDevice

    return CoreDevice(int(name) if name else None)


def _not_a_device(name: str, message: str) -> EngineError:
    return EngineError(
        message, field=DEVICE_VARIABLE, remedy="unset it, or give the number of a GPU: 0, 1, …"
    )


def load_kernels(
    bundle: Bundle, plan: LaunchPlan, device: Device, exclusive: Exclusive, wanted: Sequence[int]
) -> dict[int, Any]:
    """The `wanted` kernels of the plan by variant: the bundle's, or compiled here where Triton is
    installed.

    Raises BundleError: there are none for this device; EngineError: it refuses them.
    """
    variants = {index: plan.variants[index] for index in wanted}
    if device.sm == 0:
        return {i: device.load(variant, None, b"") for i, variant in variants.items()}
    # by name: what compiles is no part of the runtime
    fallback: Any = importlib.import_module("edge.plugins.compiler.fallback")
    part = plan.model_copy(update={"variants": tuple(variants.values())})

    def loaded(source: Any) -> dict[int, Any]:
        with exclusive:
            return {i: device.load(each, *source.get(each)) for i, each in variants.items()}

    try:
        return loaded(fallback.kernels_for(bundle, part, device.sm))
    except EngineError:
        # a driver may be too old for the ptxas that made the bundle's kernels, and not for this one
        if not fallback.can_compile():
            raise
        return loaded(fallback.compiled_here(part.variants, device.sm))
