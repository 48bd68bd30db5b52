"""An opened GGUF file, with what it knows of text."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from edge.errors import CheckpointError
from edge.export.checkpoint.checkpoint import MODEL_CARD, READ, Checkpoint
from edge.export.checkpoint.gguf.model import GgufModel
from edge.export.checkpoint.gguf.tokenizer import GgufTokenizer
from edge.export.checkpoint.layout import Layout
from edge.export.checkpoint.weights import CheckpointWeights

SUFFIX = ".gguf"


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a folder without a config.json.

    Raises CheckpointError for a folder with several.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if (path / "config.json").exists():
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:6])
        raise CheckpointError(f"holds several: {names}", file=path, remedy="name one of them")
    return found[0] if found else None


class GgufCheckpoint(Checkpoint):
    """A GGUF file's weights under canonical names, with its tokenizer."""

    def __init__(self, model: GgufModel, family: str, layout: Layout) -> None:
        """Raises CheckpointError when its tensors do not fit its metadata."""
        file = model.file
        weights = CheckpointWeights()
        weights.add(file)
        super().__init__(file.path, family, model.fields.values, model.place(layout), weights)
        text = GgufTokenizer(file.path, file.metadata, self.config.vocab_size)
        self.generation = text.generation()
        self.no_tokenizer = text.refused
        folder = Path(tempfile.mkdtemp(prefix="edge-gguf-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.tokenizer_files = text.write(folder)
        self.stated_licence = _licence(file.metadata)

    @property
    def card(self) -> Path | None:
        beside = self.path.parent / MODEL_CARD
        # beside a file on its own there may be any README
        alone = len(list(self.path.parent.glob(f"*{SUFFIX}"))) == 1
        return beside if alone and beside.is_file() and _is_card(beside) else None

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size

    def fingerprint(self) -> str:
        """SHA-256, in hex, of the file."""
        content = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(READ):
                content.update(block)
        return content.hexdigest()


def _is_card(path: Path) -> bool:
    """Whether a README is a model card: it begins with the fields that hubs read."""
    with path.open("rb") as file:
        return file.readline(8).strip() == b"---"


def _licence(metadata: dict[str, Any]) -> str | None:
    stated = metadata.get("general.license")
    return stated[:200] if isinstance(stated, str) and stated.strip() else None
