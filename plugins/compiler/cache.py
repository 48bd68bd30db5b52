"""Compiled kernels kept between runs, named by everything that can change their bytes.

One file each in the user's cache folder, `kernels/<hash>`: SHA-256 of the rest in hexadecimal, a
line of JSON, the cubin. It appears whole or not at all; one that does not match its hash is made
again. Without a writable folder every run compiles.

EDGE_PRECOMPILED names a folder of such files that another machine compiled (`tests/gpu/pack.sh`).
Engines take them before anything is compiled, whatever version of Triton is installed here; bundles
never. Their hash finds damage: whoever names the folder trusts it as code.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

from edge import launch
from edge.bundle.stamps import cache_folder
from edge.launch import CompiledKernel, Variant
from edge.plugins import catalogue
from edge.plugins.compiler.pool import TOOLS, Compiled

PRECOMPILED = "EDGE_PRECOMPILED"
_DIGEST = 64


def entry(variant: Variant, sm: int, triton: str) -> Path:
    """The file of a kernel: by variant, architecture, Triton, ptxas and kernel sources."""
    parts = (
        variant.key,
        str(sm),
        triton,
        sources(variant.kernel),
        *(_tool(name) for name in TOOLS),
    )
    return cache_folder() / "kernels" / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def precompiled(variant: Variant, sm: int) -> str:
    """The kernel's file name in a folder that EDGE_PRECOMPILED names."""
    parts = (variant.key, str(sm), sources(variant.kernel))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def find(variant: Variant, sm: int, triton: str) -> Compiled | None:
    """The kernel as another machine compiled it, or as it was compiled here; else None."""
    if folder := os.environ.get(PRECOMPILED):
        found = read(Path(folder) / precompiled(variant, sm))
        if found is not None:
            return found
    return find_own(variant, sm, triton)


def find_own(variant: Variant, sm: int, triton: str) -> Compiled | None:
    """The kernel as it was compiled here, else None."""
    return read(entry(variant, sm, triton))


def read(path: Path) -> Compiled | None:
    """What is kept there; None when there is nothing, or it is damaged."""
    try:
        data = path.read_bytes()
        digest, body = data[:_DIGEST], data[_DIGEST:]
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        header, _, cubin = body.partition(b"\n")
        facts = json.loads(header)
        return Compiled(CompiledKernel.model_validate(facts["kernel"]), facts["ptxas"], cubin)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: Path, made: Compiled) -> None:
    """Keep a kernel, if the folder can be written."""
    facts = {"kernel": made.kernel.model_dump(mode="json"), "ptxas": made.ptxas}
    body = json.dumps(facts).encode() + b"\n" + made.cubin
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + body)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


@functools.cache
def sources(kernel: str) -> str:
    """SHA-256 over what a kernel is made of: its file, those it imports, how it is compiled."""
    # constants that kernels read, and the exact way to compile them
    files = {Path(launch.__file__), Path(__file__).with_name("worker.py")}
    waiting = [catalogue.kernel_file(kernel.partition(".")[0])]
    while waiting:
        file = waiting.pop()
        if file is None or file in files or not file.exists():
            continue
        files.add(file)
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                inside = [n.split(".")[2:] for n in names if n.startswith(f"{catalogue.PACKAGE}.")]
                waiting += [catalogue.FOLDER.joinpath(*n[:-1], f"{n[-1]}.py") for n in inside]
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda each: each.name):
        digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _tool(name: str) -> str:
    """Another ptxas than Triton's own, when one is named."""
    path = os.environ.get(name, "")
    try:
        info = os.stat(path)
    except OSError:
        return path
    return f"{path} {info.st_size} {info.st_mtime_ns}"
