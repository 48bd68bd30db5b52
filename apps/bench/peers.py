"""Who is measured, and what each has to be able to do."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.apps.bench import gguf_file, model
from edge.apps.bench.shapes import Shape
from edge.errors import InputError
from edge.runtime import ort_providers

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]
Rounding = Literal["fp32", "fp16", "w8", "w4", "w8a8"]  # w8a8: activations by scales found before

RUN = 4  # tokens of the short run
INSTALL_LLAMA = ".venv/bin/pip install llama-cpp-python gguf"


class Peer(Protocol):
    """One program with the model loaded. Logits are [rows, V] and valid until the next call.

    Attributes:
        name: as on the command line.
        rounding: of what; how close its results have to be depends on it.
        version: of the program.
        weight_bytes: what it reads from disk.
        note: what a reader has to know about its figures, or "".
    """

    name: str
    rounding: Rounding
    version: str
    weight_bytes: int
    note: str

    def prefill(self, tokens: Tokens, *, every_row: bool = False) -> Logits:
        """Forget everything, then run `tokens`; logits of the last, or of each."""
        ...

    def run(self, tokens: Tokens) -> Logits:
        """Go on with a few tokens at once; logits of each."""
        ...

    def step(self, token: int) -> Logits:
        """Go on with one token; its logits."""
        ...

    def close(self) -> None:
        """Give back memory and threads."""
        ...


@dataclass
class Workspace:
    """The folder with the random model in every format that was asked for."""

    shape: Shape
    path: Path

    @property
    def checkpoint(self) -> Path:
        """transformers' format; written when first asked for."""
        return self._once("checkpoint", lambda path: model.write_checkpoint(self.shape, path))

    def gguf(self, kind: str) -> Path:
        """llama.cpp's format, `kind` as in `gguf_file.KINDS`."""
        checkpoint = self.checkpoint
        return self._once(
            f"{kind}.gguf", lambda path: gguf_file.write_gguf(self.shape, checkpoint, path, kind)
        )

    def _once(self, name: str, write: Callable[[Path], object]) -> Path:
        """A kept folder serves again, as long as what makes its files has not changed."""
        makers = (model.__file__, gguf_file.__file__)
        made_by = hashlib.sha256(b"".join(Path(file).read_bytes() for file in makers)).hexdigest()
        final = self.path / f"{self.shape.name}-{made_by[:8]}-{name}"
        if not final.exists():
            final.parent.mkdir(parents=True, exist_ok=True)
            partial = final.with_name(f".{final.name}.partial")
            write(partial)
            partial.rename(final)
        return final


@dataclass(frozen=True)
class Entry:
    """One line of the registry: what must be importable, and what makes the peer."""

    packages: tuple[str, ...]
    install: str
    make: Callable[[Workspace, int], Peer]


def _edge(recipe: Rounding, *, spin: bool = False) -> Entry:
    def make(workspace: Workspace, threads: int) -> Peer:
        from edge.apps.bench.peer_edge import EdgePeer

        return EdgePeer(workspace, recipe, threads, spin=spin)

    return Entry(("onnxruntime", "onnx", "torch"), ".venv/bin/pip install '.[export,ort]'", make)


def _llama(kind: str) -> Entry:
    def make(workspace: Workspace, threads: int) -> Peer:
        from edge.apps.bench.peer_llama import LlamaPeer

        return LlamaPeer(workspace, kind, threads)

    return Entry(("llama-cpp-python", "gguf"), INSTALL_LLAMA, make)


def _transformers(workspace: Workspace, threads: int) -> Peer:
    from edge.apps.bench.peer_transformers import TransformersPeer

    return TransformersPeer(workspace, threads)


PEERS = {
    "edge-w8": _edge("w8"),
    "edge-w8-spin": _edge("w8", spin=True),
    "edge-w8a8": _edge("w8a8"),
    "edge-w8a8-spin": _edge("w8a8", spin=True),
    "edge-w4": _edge("w4"),
    "edge-fp16": _edge("fp16"),
    "edge-fp32": _edge("fp32"),
    "llama-q8_0": _llama("q8_0"),
    "llama-q4_0": _llama("q4_0"),
    "llama-f16": _llama("f16"),
    "transformers": Entry(
        ("torch", "transformers"), ".venv/bin/pip install torch transformers", _transformers
    ),
}
DEFAULT = (
    "edge-w8", "edge-w8-spin", "edge-w8a8", "edge-w8a8-spin", "edge-w4", "edge-fp32",
    "llama-q8_0", "llama-q4_0", "transformers",
)  # fmt: skip


def missing(name: str) -> tuple[str, ...]:
    """Packages a peer needs that are not installed. Raises InputError for an unknown peer."""
    if name not in PEERS:
        raise InputError(f"there is no peer {name!r}", field="peers", remedy=", ".join(PEERS))
    return tuple(package for package in PEERS[name].packages if not installed(package))


def installed(package: str) -> str | None:
    """Version of a distribution, or None; of ONNX Runtime that of the build that is there."""
    builds = ort_providers.packages() if package == "onnxruntime" else []
    try:
        return importlib.metadata.version(builds[0] if builds else package)
    except importlib.metadata.PackageNotFoundError:
        return None
