"""The models of `make bench` on disk: one random model in every format that a peer reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import edge
from edge.apps.bench import models, weights
from edge.apps.measure.machine import installed
from edge.config import ModelConfig

PACKAGE = Path(edge.__file__).parent


@dataclass(frozen=True)
class ModelFolder:
    """Folder with the random model in every requested format.

    A file's name holds a hash of the code that made it, so one from an earlier run is reused only
    if that code has not changed.
    """

    name: str
    path: Path

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def config(self) -> ModelConfig:
        return models.model_named(self.name, models.SHAPES, "shape")

    def gguf(self, kind: str) -> Path:
        """Return the model for llama.cpp: f16, or quantized by llama.cpp itself to q8_0 or q4_0."""
        sources = [Path(str(module.__file__)) for module in (models, weights)]
        code = _hash(sources, f"{installed('llama-cpp-python')}")

        def write(path: Path) -> None:
            if kind == "f16":
                weights.write_gguf(self.config, path)
            else:
                weights.quantize_gguf(self.gguf("f16"), path, kind)

        return self._made(f"{self.name}-{code}-{kind}.gguf", write)

    def bundle(self, recipe: str) -> Path:
        """Return our bundle in that recipe."""
        from edge.export.exporter import CHUNK

        def write(path: Path) -> None:
            models.write_bundle(self.config, recipe, path, chunk=CHUNK, whole=True)

        return self._made(f"{self.name}-{_hash(_own_code())}-{recipe}", write)

    def _made(self, name: str, write: Callable[[Path], None]) -> Path:
        """Return a file or bundle of that name, written if it does not exist."""
        final = self.path / name
        if not final.exists():
            partial_path = self.path / f".{name}.partial"
            write(partial_path)
            partial_path.rename(final)
        return final


def _own_code() -> list[Path]:
    # folders may be links, into which rglob does not go from above
    folders = (path for path in PACKAGE.iterdir() if path.is_dir())
    return sorted([*PACKAGE.glob("*.py"), *(file for at in folders for file in at.rglob("*.py"))])


def _hash(sources: Iterable[Path], versions: str = "") -> str:
    digest = hashlib.sha256(versions.encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:8]
