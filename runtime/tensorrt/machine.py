"""The facts that an engine depends on: bundle, TensorRT, plugin library, GPU and driver."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edge
from edge.bundle.reader import WEIGHT_FILE
from edge.errors import BundleError, EngineError
from edge.runtime.cuda import install
from edge.runtime.tensorrt.bindings import TensorRT, dotted
from edge.runtime.tensorrt.library import PluginLibrary

if TYPE_CHECKING:
    from edge.bundle import Bundle
    from edge.runtime.cuda.core import CoreDevice

GRAPH = "tensorrt"
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_L4T = Path("/etc/nv_tegra_release")


def components(
    bundle: Bundle, trt: TensorRT, library: PluginLibrary | None, gpu: CoreDevice | None
) -> dict[str, str]:
    """Return all of `cache.COMPONENTS` except `kernels` and `flags`.

    `gpu` is None for a build ahead of time; `ahead` then fills in the architectures. Raises
    BundleError if the bundle has no device graph.
    """
    weights = bundle.manifest.entry(WEIGHT_FILE)
    graph = bundle.manifest.entry(graph_file(bundle))
    return {
        "bundle": bundle.fingerprint,
        "graph": graph.sha256 if graph else "",
        "weights": weights.sha256 if weights else "",
        "kind": trt.kind,
        "tensorrt": dotted(trt.version),
        "plugins": library.digest if library else "",
        "sm": str(gpu.sm) if gpu else "",
        "gpu": model(gpu) if gpu else "",
        "driver": driver() if gpu else "",
        "edge": edge.__version__,
    }


def ahead(components: dict[str, str], architectures: Sequence[int]) -> dict[str, str]:
    """Return the components for GPUs of these architectures that are not in this machine."""
    return components | {"sm": ",".join(map(str, sorted(set(architectures))))}


def graph_file(bundle: Bundle) -> str:
    """Return the path of the bundle's device graph. Raises BundleError if there is none."""
    file: str | None = bundle.manifest.graphs.get(GRAPH)
    if file is None:
        raise BundleError(
            "has no graph for TensorRT",
            file=f"{bundle.path}/manifest.json",
            field=f"graphs.{GRAPH}",
            remedy=f"add it with this version: edge export {bundle.path} -o NEW_BUNDLE "
            "--target cpu",
        )
    return file


def model(gpu: CoreDevice) -> str:
    """Return the GPU's model, "Orin" for "GPU 0 (Orin)": GPUs of one model share engines."""
    match = re.fullmatch(r"GPU \d+ \((.*)\)", gpu.name)
    return match[1] if match else gpu.name


def driver(kernel_module: Path = _KERNEL_MODULE, l4t: Path = _L4T) -> str:
    """Return the versions of CUDA, of the kernel module and of L4T, as far as they exist."""
    version = install.driver_version()
    parts = [] if version is None else [install.dotted(version)]
    for file, pattern in (
        (kernel_module, r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)"),
        (l4t, r"# (R\d+ \(release\), REVISION: [\d.]+)"),
    ):
        match = re.search(pattern, _read_text(file))
        parts += [match[1]] if match else []
    return ", ".join(parts)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def open_gpu() -> Any:
    """Open the GPU selected by EDGE_DEVICE as a CoreDevice.

    Raises EngineError for a missing driver, an unknown GPU or EDGE_DEVICE=interpret.
    """
    from edge.runtime.cuda.core import CoreDevice
    from edge.runtime.cuda.opening import DEVICE_VARIABLE, open_device

    device = open_device()
    if isinstance(device, CoreDevice):
        return device
    raise EngineError(
        "TensorRT runs on GPUs only",
        field=DEVICE_VARIABLE,
        remedy="unset it, or give the number of a GPU: 0, 1, …",
    )
