"""Read text as rows of tokens: files end to end, cut into rows of one length, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.bundle.files import sha256
from edge.errors import ExportError
from edge.export.calibration.texts import CalibrationText, TextReader, read_text

Ids = NDArray[np.int32]
HELD_OUT = 16  # rows to measure on, never learned
EVERY = 32  # hold out at most one row in 32


@dataclass(frozen=True)
class TokenRows:
    """Rows of token ids.

    Attributes:
        learned: ids [n, T] to learn from.
        held_out: ids [m, T] to measure on.
        record: description of the files, which a continued run must match.
    """

    learned: Ids
    held_out: Ids
    record: dict[str, object]

    @property
    def tokens(self) -> int:
        return self.learned.size

    def batch(self, number: int, size: int, seed: int) -> Ids:
        """Return batch `number`, of `size` rows."""
        return self.learned[self.places(number, size, seed)]

    def places(self, number: int, size: int, seed: int) -> NDArray[np.int64]:
        """Return the indices of the batch's rows; every epoch has a different order."""
        batches = len(self.learned) // size
        epoch, place = divmod(number, batches)
        order = np.random.default_rng([seed, epoch]).permutation(len(self.learned))
        return order[place * size : (place + 1) * size]


def read_rows(
    files: Sequence[Path], reader: TextReader, length: int, wanted: int | None, valid: Path | None
) -> TokenRows:
    """Read rows of `length` tokens from all files, or only about `wanted` tokens: a share of each
    file by its size, evenly spread. A `.npy` file holds token ids, in one dimension.

    `valid` is a file to measure on; without it a few rows of the others are held out. Raises
    ExportError when a file cannot be read or there is too little text.
    """
    sizes = [_text_bytes(file) for file in files]
    sequences, texts = [], []
    for file, size in zip(files, sizes, strict=True):
        limit = 1 << 40 if wanted is None else -(-wanted * size // (max(sum(sizes), 1) * length))
        text = _read(file, reader, max(1, limit), length)
        sequences.append(text.sequences.astype(np.int32))
        texts.append({"file": text.file, "sha256": text.sha256, "rows": len(text.sequences)})
    rows = np.concatenate(sequences)
    if valid is not None:
        valid_text = _read(valid, reader, HELD_OUT, length)
        record: dict[str, object] = {
            "text": texts,
            "valid": {"file": valid_text.file, "sha256": valid_text.sha256},
        }
        return TokenRows(rows, valid_text.sequences.astype(np.int32), record)
    count = min(HELD_OUT, len(rows) // EVERY) or 1
    if len(rows) < 2:
        raise ExportError(
            f"holds {len(rows)} rows of {length} tokens: none is left to learn", file=files[0],
            remedy="give more text, or a smaller --length",
        )  # fmt: skip
    held_out = np.linspace(0, len(rows) - 1, count + 2).astype(int)[1:-1]
    mask = np.zeros(len(rows), bool)
    mask[held_out] = True
    return TokenRows(rows[~mask], rows[mask], {"text": texts, "valid": None})


def _read(file: Path, reader: TextReader, count: int, length: int) -> CalibrationText:
    try:
        if file.suffix == ".npy":
            return _read_ids(file, reader.tokenizer.vocab_size, count, length)
        return read_text(file, reader, count, length)
    except ExportError as problem:
        raise ExportError(
            problem.message, file=problem.file, field="text", remedy=problem.remedy
        ) from None


def _text_bytes(file: Path) -> int:
    """Return the size of a file's text; a token of a `.npy` file counts as 4 bytes."""
    if not file.is_file():
        return 0
    size = file.stat().st_size
    if file.suffix != ".npy":
        return size
    try:
        return 4 * int(np.load(file, mmap_mode="r", allow_pickle=False).size)
    except (OSError, ValueError, EOFError, AttributeError):
        return size  # reading it will say what is wrong


def _read_ids(file: Path, vocab_size: int, count: int, length: int) -> CalibrationText:
    """Read at most `count` rows of `length` ids, evenly spread, from an array in a `.npy` file."""
    remedy = "save integers below the vocabulary's size in one dimension, with numpy.save"
    try:
        with file.open("rb") as opened:
            digest = sha256(opened.fileno(), file.stat().st_size)
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as problem:
        raise ExportError(f"cannot be read: {problem}", file=file, remedy=remedy) from None
    if not isinstance(ids, np.ndarray):
        raise ExportError("is an archive of arrays, not one", file=file, remedy=remedy)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ExportError(f"holds {ids.dtype} of shape {ids.shape}", file=file, remedy=remedy)
    available = ids.size // length
    if not available:
        raise ExportError(
            f"has {ids.size} tokens, too few for one row of {length}", file=file,
            remedy="give more text, or ask for shorter rows",
        )  # fmt: skip
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ExportError(f"has ids outside 0 to {vocab_size - 1}", file=file, remedy=remedy)
    used = min(count, available)
    rows = ids[: available * length].reshape(available, length)
    sequences = rows[np.arange(used) * available // used].astype(np.int64)
    return CalibrationText(sequences, count, file.name, digest)
