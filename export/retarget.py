"""Add what GPUs run to a finished bundle, without changing its weights or its graph."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edge.bundle import Bundle, BundleWriter, Manifest, open_bundle
from edge.bundle.files import blocks
from edge.bundle.kernels import DEVICE_GRAPH, DEVICE_GRAPH_FILE, PLAN, PLAN_FILE
from edge.errors import BundleError
from edge.export.calibration.prepare import Progress
from edge.export.exporter import ExportSummary, size_line
from edge.export.kernels import Added, add_kernels, add_plan, check_can_compile
from edge.tensors import parameters


def add_targets(
    bundle: str | os.PathLike[str],
    out: str | os.PathLike[str],
    architectures: Sequence[int] = (),
    *,
    progress: Progress | None = None,
) -> ExportSummary:
    """Write the bundle to `out` with this version's launch plan, device graph and kernels.

    Kernels that the bundle already has for other architectures are recompiled for the new plan.
    Unchanged files are hard-linked where the file system allows, and copied elsewhere. `out` may be
    the bundle itself.

    Raises BundleError when the bundle is damaged or altered; ExportError when the graph cannot be
    lowered, or kernels cannot be compiled on this machine.
    """
    report = progress or (lambda stage, fraction: None)
    report("reading", 0.0)
    with open_bundle(bundle) as opened, BundleWriter(out) as writer:
        manifest = opened.manifest
        graph = manifest.graphs.get("ort")
        if graph is None:
            raise BundleError(
                "names no graph to make a launch plan from",
                file=opened.path / "manifest.json",
                field="graphs.ort",
                remedy="export the model again from its checkpoint",
            )
        all_architectures = sorted({*architectures, *(int(name[3:]) for name in manifest.kernels)})
        check_can_compile(all_architectures)
        for path in _unchanged_files(manifest):
            _copy_file(opened, path, writer.path(path))
        report("planning", 0.2)
        planned = add_plan(writer, graph, all_architectures)
        added = add_kernels(writer, planned, all_architectures, report, (0.3, 0.9))
        report("hashing", 0.9)
        written = writer.finish(**_fields(manifest, added))
        report("done", 1.0)
        count = parameters(manifest.model)
        return ExportSummary(
            path=writer.target,
            manifest=written,
            parameters=count,
            checkpoint_bytes=manifest.nbytes,
            accuracy="unchanged: the graph and the weights are the same",
            verdict=f"{size_line(written, count)}; weights unchanged",
            unplanned=added.unplanned,
            unbuildable=added.unbuildable,
        )


def _unchanged_files(manifest: Manifest) -> list[str]:
    generated = (PLAN_FILE, DEVICE_GRAPH_FILE, *(f"kernels/{name}/" for name in manifest.kernels))
    return [entry.path for entry in manifest.files if not entry.path.startswith(generated)]


def _fields(manifest: Manifest, added: Added) -> dict[str, object]:
    fields = {name: getattr(manifest, name) for name in Manifest.model_fields if name != "files"}
    graphs = {n: path for n, path in manifest.graphs.items() if n not in (PLAN, DEVICE_GRAPH)}
    return fields | {"graphs": graphs | added.graphs, "kernels": added.kernels}


def _copy_file(bundle: Bundle, path: str, target: Path) -> None:
    """Hard-link or copy a file of the bundle as it was hashed, even if it was replaced since."""
    fd = bundle.fd(path)
    if _try_link(bundle.path / path, target):
        checked, linked = os.fstat(fd), os.lstat(target)
        if (checked.st_dev, checked.st_ino) == (linked.st_dev, linked.st_ino):
            return
        target.unlink()
    with target.open("xb") as copy:
        for block in blocks(fd, os.fstat(fd).st_size):
            copy.write(block)


def _try_link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, no hard links, or a file of another user
        return False
    return True
