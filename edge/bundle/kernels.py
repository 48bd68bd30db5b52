"""A bundle's launch plan and compiled kernels, opened and checked one cubin at a time."""

from __future__ import annotations

from pathlib import Path

from edge.bundle.files import REMEDY
from edge.bundle.manifest import Manifest
from edge.bundle.reader import WEIGHT_FILE, Bundle
from edge.bundle.strict_json import Document, read_document
from edge.errors import BundleError
from edge.launch import (
    SCHEMA_VERSION,
    CompiledKernel,
    KernelIndex,
    LaunchPlan,
    Variant,
)
from edge.launch_checks import check_plan

PLAN = "cuda"
PLAN_FILE = "graphs/cuda.json"
# the same launches as plugin nodes, for TensorRT
DEVICE_GRAPH = "tensorrt"
DEVICE_GRAPH_FILE = "graphs/tensorrt.onnx"
_MAX_FILE_BYTES = 64 << 20


def index_file(sm: int) -> str:
    """Return the path of an architecture's kernel index in a bundle; cubins lie beside it."""
    return f"kernels/sm_{sm}/kernels.json"


def sizes(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Return architecture ("sm_87") → (number of cubins, their bytes including the index)."""
    counts = {}
    for name, index in sorted(manifest.kernels.items(), key=lambda item: int(item[0][3:])):
        files = [e for e in manifest.files if e.path.startswith(f"{index.rpartition('/')[0]}/")]
        counts[name] = (len(files) - 1, sum(entry.size for entry in files))
    return counts


class BundledKernels:
    """The kernels of a bundle for one architecture.

    Attributes:
        index: compiled kernels of the plan's variants.
    """

    def __init__(self, bundle: Bundle, file: str, index: KernelIndex) -> None:
        self.index = index
        self._bundle = bundle
        self._file = file
        self._folder = file.rpartition("/")[0]

    def get(self, variant: Variant) -> tuple[CompiledKernel, bytes]:
        """Return a kernel and its cubin, with the hash checked.

        Raises BundleError when the index lacks it or its file is altered or truncated.
        """
        kernel = self.index.kernels.get(variant.key)
        if kernel is None:
            raise BundleError(
                f"has no kernel {variant.key}, which the plan launches",
                file=f"{self._bundle.path}/{self._file}",
                field="kernels",
                remedy=_remedy(self._bundle, self.index.sm),
            )
        return kernel, self._bundle.read(f"{self._folder}/{kernel.file}")


def open_plan(bundle: Bundle) -> LaunchPlan:
    """Return the bundle's launch plan.

    Raises BundleError when there is none, or it is of another version or another model.
    """
    file = bundle.manifest.graphs.get(PLAN)
    if file is None:
        raise BundleError(
            "has no launch plan, which the engines cpu and cuda need",
            file=f"{bundle.path}/manifest.json",
            field=f"graphs.{PLAN}",
            remedy=f"add it with this version: {_export_command(bundle, 'cpu')}",
        )
    plan = _read_json(bundle, file, LaunchPlan)
    manifest, entry = bundle.manifest, bundle.manifest.entry(WEIGHT_FILE)
    try:
        check_plan(
            plan,
            manifest.model,
            weight_bytes=0 if entry is None else entry.size,
            state_dtypes=manifest.state_dtypes,
        )
    except BundleError as problem:
        raise BundleError(
            problem.message,
            file=f"{bundle.path}/{file}",
            field=problem.field,
            remedy=problem.remedy,
        ) from None
    return plan


def open_kernels(bundle: Bundle, sm: int) -> BundledKernels:
    """Return the bundle's kernels for an architecture, 87 for sm_87.

    Raises BundleError when there are none (`field` is kernels.sm_87), when the index is of another
    version or architecture, or when it names a file that the bundle lacks.
    """
    file = bundle.manifest.kernels.get(f"sm_{sm}")
    if file is None:
        available = ", ".join(sorted(bundle.manifest.kernels)) or "none"
        raise BundleError(
            f"has no kernels for sm_{sm}, only: {available}",
            file=f"{bundle.path}/manifest.json",
            field=f"kernels.sm_{sm}",
            remedy=_remedy(bundle, sm),
        )
    index = _read_json(bundle, file, KernelIndex)
    where = f"{bundle.path}/{file}"
    if index.sm != sm:
        raise BundleError(f"is {index.sm}, not {sm}", file=where, field="sm", remedy=REMEDY)
    folder, listed = file.rpartition("/")[0], {entry.path for entry in bundle.manifest.files}
    for key, kernel in index.kernels.items():
        if f"{folder}/{kernel.file}" not in listed:
            raise BundleError(
                f"names {kernel.file}, which the manifest does not list",
                file=where,
                field=f"kernels.{key}.file",
                remedy=REMEDY,
            )
    return BundledKernels(bundle, file, index)


def _read_json(bundle: Bundle, file: str, kind: type[Document]) -> Document:
    where, entry = f"{bundle.path}/{file}", bundle.manifest.entry(file)
    if entry is not None and entry.size > _MAX_FILE_BYTES:
        raise BundleError(f"has {entry.size} bytes, at most {_MAX_FILE_BYTES} allowed", file=where)
    # the plan omits fields at their default, its version included; the index does not
    return read_document(
        bundle.read(file), Path(where), kind, SCHEMA_VERSION, absent=SCHEMA_VERSION
    )


def _remedy(bundle: Bundle, sm: int) -> str:
    return (
        f"add them: {_export_command(bundle, f'sm_{sm}')}; "
        "or install Triton on this machine, which compiles them when the bundle is loaded: "
        "pip install 'mamba-edge[kernels]'"
    )


def _export_command(bundle: Bundle, target: str) -> str:
    return f"edge export {bundle.path} -o NEW_BUNDLE --target {target}"
