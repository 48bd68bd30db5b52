"""What an engine depends on, as it is here: bundle, TensorRT, plugin library, GPU, driver."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edge
from edge.bundle.kernels import WEIGHT_FILE
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
    """Everything of `cache.COMPONENTS` but `kernels` and `flags`. Raises BundleError: no graph.

    Without `gpu` the engine is built for others (`ahead`).
    """
    weights = bundle.manifest.entry(WEIGHT_FILE)
    found = bundle.manifest.entry(graph_file(bundle))
    return {
        "bundle": bundle.fingerprint,
        "graph": found.sha256 if found else "",
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
    """The same for GPUs that are not here."""
    return components | {"sm": ",".join(map(str, sorted(set(architectures))))}


def graph_file(bundle: Bundle) -> str:
    """The bundle's device graph. Raises BundleError: it has none."""
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
    """ "Orin" of "GPU 0 (Orin)": two GPUs of one model share engines."""
    found = re.fullmatch(r"GPU \d+ \((.*)\)", gpu.name)
    return found[1] if found else gpu.name


def driver(kernel_module: Path = _KERNEL_MODULE, l4t: Path = _L4T) -> str:
    """CUDA's version, the kernel module's, and L4T's: whatever of these the machine has."""
    version = install.driver_version()
    parts = [] if version is None else [install.dotted(version)]
    for file, pattern in (
        (kernel_module, r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)"),
        (l4t, r"# (R\d+ \(release\), REVISION: [\d.]+)"),
    ):
        found = re.search(pattern, _text(file))
        parts += [found[1]] if found else []
    return ", ".join(parts)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def open_gpu() -> Any:
    """The GPU that EDGE_DEVICE means, a CoreDevice.

    Raises EngineError: no driver, no such GPU, EDGE_DEVICE=interpret.
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
