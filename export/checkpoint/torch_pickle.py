"""Checks of the pickles in a PyTorch file, before torch reads them.

torch's weights-only loader runs no code, but it calls more than tensors need: `bytearray(1 << 33)`
takes 8 GiB, `_codecs.encode(…, "hex")` doubles a text again and again, and a byte can make an empty
dictionary. Here only what `torch.save` writes for named tensors passes, and it is counted.
"""

from __future__ import annotations

import io
import mmap
import pickletools
import zipfile
from pathlib import Path

import torch

from edge.errors import CheckpointError

DOWNLOAD = "download the file again"
MAX_PICKLE = 64 << 20  # bytes of the pickle that lists a file's tensors
# a tensor takes 25 operations and two calls
MAX_OPERATIONS, MAX_CALLS = 4_000_000, 300_000
_LEGACY_PICKLES = 5  # magic number, version, machine, tensors, keys of the storages
_ALLOWED = frozenset({
    "collections OrderedDict", "torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
})  # fmt: skip
# operations that name something to call in another way than GLOBAL, or take bytes from elsewhere;
# torch.save writes none of them
_OTHER_WAYS = frozenset({
    "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "BYTEARRAY8",
    "NEXT_BUFFER", "READONLY_BUFFER",
})  # fmt: skip
_CALLS = frozenset({"REDUCE", "NEWOBJ", "BUILD"})


def check_torch_file(path: Path) -> None:
    """Raise CheckpointError for a file whose pickles hold more than named tensors.

    Archives are refused, too, if they expand when unpacked or hold a name twice.
    """
    try:
        if zipfile.is_zipfile(path):  # which raises, too
            _check_archive(path)
            return
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[257:262] == b"ustar":
                raise CheckpointError(
                    "is a tar archive, which torch wrote before 0.1.10", file=path,
                    remedy="save it again with a newer torch",
                )  # fmt: skip
            count = _Counts(path)
            for _ in range(_LEGACY_PICKLES):
                count.add(data)
    except CheckpointError:
        raise
    except Exception as error:  # damage makes these libraries raise almost any exception
        raise CheckpointError(
            f"damaged or cut short: {error!s:.200}", file=path, remedy=DOWNLOAD
        ) from error


def _check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
        if compressed or sum(member.file_size for member in members) > path.stat().st_size:
            raise CheckpointError(
                "holds compressed data, which torch does not write", file=path, remedy=DOWNLOAD
            )
        # torch's reader does not distinguish case
        if len({member.filename.lower() for member in members}) < len(members):
            raise CheckpointError("holds a name twice", file=path, remedy=DOWNLOAD)
        pickles = [member for member in members if member.filename.lower().endswith(".pkl")]
        if sum(member.file_size for member in pickles) > MAX_PICKLE:
            raise _too_many(path)
        count = _Counts(path)
        for member in pickles:
            count.add(io.BytesIO(archive.read(member)))


class _Counts:
    """Counts the operations of a file's pickles, and refuses those that tensors do not need."""

    def __init__(self, path: Path) -> None:
        self._path, self._operations, self._calls = path, 0, 0

    def add(self, pickle: io.BytesIO | mmap.mmap) -> None:
        """Read one pickle, up to its end."""
        for operation, argument, _ in pickletools.genops(pickle):  # type: ignore[arg-type]
            self._operations += 1
            self._calls += operation.name in _CALLS
            if self._operations > MAX_OPERATIONS or self._calls > MAX_CALLS:
                raise _too_many(self._path)
            if pickle.tell() > MAX_PICKLE:
                raise _too_many(self._path)
            if operation.name in _OTHER_WAYS:
                raise _foreign(self._path, f"uses {operation.name}")
            if operation.name == "GLOBAL" and not _is_allowed(str(argument)):
                raise _foreign(self._path, f"refers to {str(argument).replace(' ', '.'):.100}")


def _is_allowed(name: str) -> bool:
    """Return whether a pickle of tensors may name this: torch's storages and dtypes are not
    functions."""
    module, _, attribute = name.partition(" ")
    storage = module in ("torch", "torch.cuda") and attribute.endswith("Storage")
    dtype = module == "torch" and isinstance(getattr(torch, attribute, None), torch.dtype)
    return name in _ALLOWED or storage or dtype


def _foreign(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{what}, which named tensors do not need and which could run code; nothing was run",
        file=path, remedy="use a safetensors file from a source you trust",
    )  # fmt: skip


def _too_many(path: Path) -> CheckpointError:
    return CheckpointError(
        f"lists its tensors in more than {MAX_PICKLE} bytes, {MAX_OPERATIONS} operations or "
        f"{MAX_CALLS} calls", file=path, remedy=DOWNLOAD,
    )  # fmt: skip
