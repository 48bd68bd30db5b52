"""State files: one saved state, written atomically and fully checked before use.

    magic     8 bytes  b"EDGESTAT"
    version   u32      little endian, like all numbers
    header    u32      length of the header
    payload   u64      length of the payload
    extra     u64      length of the extra
    digest    32 bytes SHA-256 of all other bytes of the file
    header    JSON: identity, position, batch, layout
    payload   safetensors: the state's tensors, each in the dtype the model keeps it in
    extra     JSON of the caller, such as a transcript

The digest detects damage but not an attacker, who could compute it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as parse_tensors
from safetensors.numpy import save as format_tensors

from edge.bundle import strict_json
from edge.errors import Faults, StateError
from edge.replace import clear, replace
from edge.runtime.layout import Identity, Shape, StateLayout

Tensors = Mapping[str, NDArray[Any]]

MAGIC = b"EDGESTAT"
VERSION = 1
MAX_HEADER = 4 << 20
MAX_EXTRA = 64 << 20
# room for safetensors' own header besides the tensors' bytes
_PAYLOAD_SLACK = 8 << 20
MAX_UNUSED = 16 << 30  # bytes of a payload that is only hashed, in pieces
_READ_SIZE = 1 << 20

_PREFIX = struct.Struct("<8sIIQQ")
_DIGEST = 32
OPEN_IT = "open it with the bundle it was saved with"
_DAMAGED = (
    "the file is damaged; load the save before it, its name with ~ added, or start a new session"
)


@dataclass(frozen=True)
class Saved:
    """The content of a state file, fully checked."""

    tensors: Tensors
    position: int
    extra: dict[str, Any]


def write(
    path: str | os.PathLike[str],
    identity: Identity,
    layout: StateLayout,
    position: int,
    tensors: Tensors,
    extra: Mapping[str, Any],
) -> None:
    """Write a state file atomically. An existing file at `path` is kept as `path`~.

    Raises StateError if tensors are not finite, `extra` is not JSON or too large, or writing fails.
    The old file is then in place, or the complete new one, which may not survive a loss of power.
    """
    file = Path(path)
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise StateError("the state is not finite and is not saved", file=file, field=name)
    header = json.dumps(_header(identity, layout, position), allow_nan=False).encode()
    payload = format_tensors(dict(tensors))
    extra_bytes = _format_extra(extra, file)
    prefix = _PREFIX.pack(MAGIC, VERSION, len(header), len(payload), len(extra_bytes))
    sha = digest(prefix, header, payload, extra_bytes)
    try:
        replace(file, (prefix, sha, header, payload, extra_bytes), keep=True)
    except OSError as problem:
        raise StateError(
            f"cannot be written: {problem.strerror or problem}", file=file
        ) from problem


def _header(
    identity: Identity, layout: StateLayout, position: int, whole: bool | None = None
) -> dict[str, Any]:
    return {
        "identity": told(identity),
        "position": position,
        "batch": layout.batch,
        "layout": {name: list(shape) for name, shape in _shapes(layout, position, whole).items()},
    }


def told(identity: Identity) -> dict[str, str]:
    """Return the identity as a file stores it."""
    return {name: value for name, value in asdict(identity).items() if name != "bundle"}


def _shapes(layout: StateLayout, position: int, whole: bool | None = None) -> dict[str, Shape]:
    """Return the shapes of the saved tensors. `whole`: see `StateLayout.cache_shapes`."""
    return layout.recurrent | layout.cache_shapes(position, whole=whole)


def _format_extra(extra: Mapping[str, Any], file: Path) -> bytes:
    try:
        data = json.dumps(dict(extra), allow_nan=False, ensure_ascii=False).encode()
        if json.loads(data) != extra or len(data) > MAX_EXTRA:
            raise ValueError(f"it must be plain JSON of at most {MAX_EXTRA} bytes")
        strict_json.loads(data)
    except (TypeError, ValueError, RecursionError) as problem:
        raise StateError(f"cannot be saved: {problem}", file=file, field="extra") from None
    return data


def digest(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def read(path: str | os.PathLike[str], identity: Identity, layout: StateLayout) -> Saved:
    """Read and check a state file, and remove leftovers of killed saves.

    Raises StateError naming what does not match.
    """
    file = Path(path)
    clear(file)
    rows = layout.cache_shapes(layout.capacity, whole=True)
    caches = sum(layout.bytes_of(name, shape) for name, shape in rows.items())
    header, payload, extra = _read(file, layout.slot_bytes + caches + _PAYLOAD_SLACK)
    position, whole = _check_header(file, header, identity, layout, extra)
    tensors = _check_payload(file, payload, layout, _shapes(layout, position, whole))
    return Saved(tensors, position, _parse_extra(file, extra))


def read_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the `extra` of a state file of any model. Raises StateError for a damaged file."""
    file = Path(path)
    return _parse_extra(file, _read(file, MAX_UNUSED, keep=False)[2])


def _read(file: Path, max_payload: int, *, keep: bool = True) -> tuple[bytes, bytes, bytes]:
    """Read header, payload of at most `max_payload` bytes, and extra, and check the digest.

    Without `keep`, the payload is only hashed and returned as b"".
    """
    try:
        # O_NONBLOCK: opening a pipe would otherwise wait for a writer
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as stream:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise StateError("is not a file", file=file)
            prefix = stream.read(_PREFIX.size)
            lengths = _lengths(file, prefix, info.st_size, max_payload)
            stored_digest, hasher = stream.read(_DIGEST), hashlib.sha256(prefix)

            def read_exactly(length: int) -> bytes:
                part = stream.read(length)
                if len(part) != length:
                    raise StateError("was cut short while it was read", file=file, remedy=_DAMAGED)
                hasher.update(part)
                return part

            header, payload = read_exactly(lengths[0]), b""
            if keep:
                payload = read_exactly(lengths[1])
            else:
                for at in range(0, lengths[1], _READ_SIZE):
                    read_exactly(min(_READ_SIZE, lengths[1] - at))
            extra = read_exactly(lengths[2])
    except OSError as problem:
        raise StateError(f"cannot be read: {problem.strerror or problem}", file=file) from problem
    if hasher.digest() != stored_digest:
        raise StateError("does not match its SHA-256", file=file, remedy=_DAMAGED)
    return header, payload, extra


def _lengths(file: Path, prefix: bytes, size: int, max_payload: int) -> tuple[int, int, int]:
    """Return the lengths of header, payload and extra, after checking them against the file's."""
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise StateError("is not a saved state", file=file)
    _, version, header, payload, extra = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise StateError(
            f"has version {version}, this runtime reads version {VERSION}",
            file=file,
            field="version",
            remedy="update mamba-edge" if version > VERSION else None,
        )
    # check the limits before reading anything of that length
    for name, length, limit in (
        ("header", header, MAX_HEADER), ("payload", payload, max_payload),
        ("extra", extra, MAX_EXTRA),
    ):  # fmt: skip
        if length > limit:
            raise StateError(f"{length} bytes, at most {limit} expected", file=file, field=name)
    expected = _PREFIX.size + _DIGEST + header + payload + extra
    if size != expected:
        fault = "is cut short" if size < expected else "has bytes after its end"
        raise StateError(f"{fault}: {size} bytes, {expected} expected", file=file, remedy=_DAMAGED)
    return header, payload, extra


def _check_header(
    file: Path, data: bytes, identity: Identity, layout: StateLayout, extra: bytes
) -> tuple[int, bool]:
    """Check the header and return the position and whether every KV cache is whole.

    Engines differ in whether caches are whole. `extra` may name the model, for the error.
    """
    try:
        header = strict_json.loads(data)
    except ValueError as problem:
        raise StateError(f"is not JSON: {problem}", file=file, field="header") from None
    if not isinstance(header, dict) or not isinstance(header.get("identity"), dict):
        raise StateError("is not understood", file=file, field="header")
    faults = Faults()
    if identity.bundle and header["identity"].get("model") == identity.bundle:
        header["identity"]["model"] = identity.model  # earlier versions wrote the bundle's
    for field, ours in told(identity).items():
        theirs = header["identity"].get(field)
        if theirs != ours:
            faults.add(field, f"was saved with another {field}: {_abbreviate(theirs)}, "
                              f"this is {_abbreviate(ours)}")  # fmt: skip
    if faults:
        name = _parse_extra(file, extra).get("model")
        is_named = isinstance(name, str) and name
        remedy = f"it was saved with {name:.80}: open it with that" if is_named else OPEN_IT
        faults.refuse(StateError, file=file, remedy=remedy)
    batch, position = header.get("batch"), header.get("position")
    if batch != layout.batch:
        raise StateError(f"holds {batch} sequences, this state {layout.batch}", file=file)
    if type(position) is not int or not 0 <= position < 1 << 62:
        raise StateError(
            f"is not a number of tokens: {position!r:.80}", file=file, field="position"
        )
    if layout.caches and position > layout.capacity:
        raise StateError(
            f"holds {position} tokens, the KV caches have room for {layout.capacity}",
            file=file,
            field="position",
            remedy="load it into a session with a larger capacity",
        )
    for whole in (True, False):
        if header == _header(identity, layout, position, whole):
            return position, whole
    raise StateError("does not describe this model's state", file=file, field="layout")


def _abbreviate(value: object) -> str:
    """Return the first digits of a fingerprint, enough to tell two apart."""
    text = str(value)
    return f"{text[:12]}…" if len(text) > 24 else repr(text)


def _check_payload(
    file: Path, data: bytes, layout: StateLayout, shapes: Mapping[str, Shape]
) -> Tensors:
    try:
        tensors: dict[str, NDArray[Any]] = parse_tensors(data)
    except (SafetensorError, KeyError, ValueError) as problem:
        raise StateError(
            f"is not safetensors data: {problem}", file=file, field="payload"
        ) from None
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        raise StateError("does not hold this model's tensors", file=file, field="payload")
    for name in shapes:
        tensor = tensors[name]
        if tensor.dtype != layout.dtype(name):
            raise StateError(
                f"is {tensor.dtype}, this model's is {layout.dtype(name)}",
                file=file,
                field=name,
                remedy=OPEN_IT,
            )
        # one pass without a temporary array: a sum is finite only if its terms are
        with np.errstate(invalid="ignore"):
            total = float(tensor.sum(dtype=np.float64))
        if not math.isfinite(total):
            raise StateError("is not finite", file=file, field=name)
    return tensors


def _parse_extra(file: Path, data: bytes) -> dict[str, Any]:
    try:
        extra = strict_json.loads(data)
    except ValueError as problem:
        raise StateError(f"is not JSON: {problem}", file=file, field="extra") from None
    if not isinstance(extra, dict):
        raise StateError("is not an object", file=file, field="extra")
    return extra
