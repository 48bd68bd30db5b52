"""Generate malformed bundles: each is a name and a function that corrupts a good one.

A corrupted file is listed again with its new size and hash, as an attacker would do: the tests are
about the checks behind the hashes. Manifest cases corrupt every field.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Spoil = Callable[[Path], None]
Place = tuple[str | int, ...]

_WRONG: dict[str, Any] = {
    "null": None,
    "negative": -1,
    "2^63": 1 << 63,
    "fraction": 0.5,
    "text": "x",
    "list": [[]],
    "object": {"x": {}},
    "true": True,
    "figures": "8",
    "long text": "A" * 100_000,
    "control text": "a\x00b",
    "above": "../../etc/passwd",
}


def resigned(folder: Path) -> None:
    """List every file with its current size and hash."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        data = (folder / entry["path"]).read_bytes()
        entry["size"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yield every position in a JSON document; of lists only the first element."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def _changed(place: Place, value: Any, *, drop: bool = False) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "manifest.json"
        manifest = json.loads(file.read_text())
        inner = manifest
        for key in place[:-1]:
            inner = inner[key]
        if drop:
            del inner[place[-1]]
        else:
            inner[place[-1]] = copy.deepcopy(value)
        file.write_text(json.dumps(manifest))

    return spoil


def manifest_cases(manifest: dict[str, Any]) -> Iterator[tuple[str, Spoil]]:
    for place in places(manifest):
        name = ".".join(map(str, place))
        yield f"{name} missing", _changed(place, None, drop=True)
        for what, value in _WRONG.items():
            yield f"{name} is {what}", _changed(place, value)


def text_cases() -> Iterator[tuple[str, Spoil]]:
    """Yield cases with the manifest's text corrupted."""
    texts = {
        "empty": b"",
        "a list": b"[]",
        "a number": b"7",
        "deep lists": b"[" * 100_000,
        "deep objects": b'{"a":' * 100_000,
        "NaN": b'{"schema_version": NaN}',
        "not UTF-8": b'{"a": "\xff\xfe"}',
        "byte order mark": b"\xef\xbb\xbf{}",
        "a key twice": b'{"schema_version": 1, "schema_version": 1}',
        "megabytes of spaces": b" " * (20 << 20),
        "a number of a million digits": b'{"schema_version": ' + b"9" * 1_000_000 + b"}",
        "lone surrogate": b'{"created_by": "\\ud800"}',
    }
    for name, text in texts.items():
        yield (
            f"manifest: {name}",
            lambda folder, text=text: (folder / "manifest.json").write_bytes(text) and None,
        )


def _rewritten(path: str, change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / path
        file.write_bytes(change(file.read_bytes()))
        resigned(folder)

    return spoil


def file_cases(paths: list[str]) -> Iterator[tuple[str, Spoil]]:
    """Yield cases with every listed file truncated, extended or replaced, and listed again."""
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda data: b"",
        "one byte": lambda data: data[:1],
        "half": lambda data: data[: len(data) // 2],
        "all but a byte": lambda data: data[:-1],
        "zeros": lambda data: bytes(len(data)),
        "ones": lambda data: b"\xff" * len(data),
        "reversed": lambda data: data[::-1],
        "a JSON list": lambda data: b"[]",
        "random": lambda data: hashlib.shake_256(data).digest(min(len(data), 100_000)),
    }
    for path in paths:
        for name, change in changes.items():
            yield f"{path}: {name}", _rewritten(path, change)


def link_cases(paths: list[str]) -> Iterator[tuple[str, Spoil]]:
    """Yield cases with every listed file missing, or replaced by something other than a file."""

    def gone(folder: Path, path: str) -> None:
        (folder / path).unlink()

    def linked(folder: Path, path: str) -> None:
        outside = folder.parent / "outside"
        (folder / path).rename(outside)
        (folder / path).symlink_to(outside)

    def named_pipe(folder: Path, path: str) -> None:
        (folder / path).unlink()
        os.mkfifo(folder / path)

    def folder_instead(folder: Path, path: str) -> None:
        (folder / path).unlink()
        (folder / path).mkdir()

    for path in paths:
        for spoil in (gone, linked, named_pipe, folder_instead):
            name = f"{path}: {spoil.__name__.replace('_', ' ')}"
            yield name, lambda folder, spoil=spoil, path=path: spoil(folder, path)
