"""A cache of compiled kernels, keyed by everything that can change their bytes.

Each kernel is a file in the user's cache folder, `kernels/<hash>`: the SHA-256 of the rest in
hexadecimal, a line of JSON, the cubin. Files are written atomically. A file that does not match its
hash is compiled again. Without a writable folder, every run compiles.

EDGE_PRECOMPILED names a folder of such files from another machine (`tests/gpu/pack.sh`). Engines
prefer them to compiling, whatever version of Triton is installed here; bundles never contain them.
The hash only detects damage: to name the folder is to trust its contents as code.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path

from edge import launch
from edge.bundle.stamps import cache_folder
from edge.launch import CompiledKernel, Variant
from edge.plugins import catalogue
from edge.plugins.compiler.pool import TOOLS, Compiled
from edge.replace import replace

PRECOMPILED = "EDGE_PRECOMPILED"
_DIGEST = 64


def entry(variant: Variant, sm: int, triton: str) -> Path:
    """Return the cache file for a variant, architecture, Triton, ptxas and kernel sources."""
    parts = (
        variant.key,
        str(sm),
        triton,
        sources(variant.kernel),
        *(_tool(name) for name in TOOLS),
    )
    return cache_folder() / "kernels" / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def precompiled(variant: Variant, sm: int) -> str:
    """Return the kernel's file name in the folder EDGE_PRECOMPILED."""
    parts = (variant.key, str(sm), sources(variant.kernel))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def find(variant: Variant, sm: int, triton: str) -> Compiled | None:
    """Return the kernel from EDGE_PRECOMPILED, else from this machine's cache, else None."""
    if folder := os.environ.get(PRECOMPILED):
        found = read(Path(folder) / precompiled(variant, sm))
        if found is not None:
            return found
    return find_own(variant, sm, triton)


def find_own(variant: Variant, sm: int, triton: str) -> Compiled | None:
    """Return the kernel from this machine's cache, or None."""
    return read(entry(variant, sm, triton))


def read(path: Path) -> Compiled | None:
    """Return the kernel stored in a file, or None when the file is missing or damaged."""
    try:
        data = path.read_bytes()
        digest, body = data[:_DIGEST], data[_DIGEST:]
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        header, _, cubin = body.partition(b"\n")
        facts = json.loads(header)
        return Compiled(CompiledKernel.model_validate(facts["kernel"]), facts["ptxas"], cubin)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write(path: Path, made: Compiled) -> None:
    """Store a kernel, if the folder is writable."""
    facts = {"kernel": made.kernel.model_dump(mode="json"), "ptxas": made.ptxas}
    body = json.dumps(facts).encode() + b"\n" + made.cubin
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace(path, [hashlib.sha256(body).hexdigest().encode(), body])


@functools.cache
def sources(kernel: str) -> str:
    """Return the SHA-256 of a kernel's sources: its file, the files it imports, the worker's."""
    # launch.py has constants that kernels read; worker.py decides how they are compiled
    files = {Path(launch.__file__), Path(__file__).with_name("worker.py")}
    pending = [catalogue.kernel_file(kernel.partition(".")[0])]
    while pending:
        file = pending.pop()
        if file is None or file in files or not file.exists():
            continue
        files.add(file)
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                modules = [n.split(".")[2:] for n in names if n.startswith(f"{catalogue.PACKAGE}.")]
                pending += [catalogue.FOLDER.joinpath(*n[:-1], f"{n[-1]}.py") for n in modules]
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _tool(name: str) -> str:
    """Identify the ptxas that the environment variable `name` sets; "" when it is not set."""
    path = os.environ.get(name, "")
    try:
        info = os.stat(path)
    except OSError:
        return path
    return f"{path} {info.st_size} {info.st_mtime_ns}"
