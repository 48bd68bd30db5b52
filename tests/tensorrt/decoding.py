"""The plugin library's decoders as a program that prints back what Python encoded."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal

from edge.launch import Size
from edge.plugins.tensorrt.launches import NodeLaunches, Place
from tests.compiling import compiled

_FOLDER = Path(__file__).parent
_SOURCES = _FOLDER.parents[1] / "plugins" / "tensorrt" / "src"
_PARTS = ("blob", "launches", "sizes", "words")
_OPTIONS = ("-std=c++17", "-O0", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion")
_SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@cache
def _sanitized(compiler: str) -> bool:
    command = [compiler, *_SANITIZED, "-x", "c++", "-", "-o", "/dev/null"]
    return subprocess.run(command, input=b"int main(){}", capture_output=True).returncode == 0


def sanitized() -> Path:
    """Build the program, with sanitizers if the compiler has them."""
    options = _SANITIZED if shutil.which("g++") and _sanitized("g++") else ()
    return compiled_by("g++", *options)


def compiled_by(compiler: str, *options: str) -> Path:
    """Build the program with this compiler."""
    sources = [str(_SOURCES / f"{part}.cpp") for part in _PARTS]
    main = str(_FOLDER / "decoder" / "decode.cpp")
    return compiled("decode", compiler, *_OPTIONS, "-Werror", *options, main, *sources)


def decoded(program: Path, kind: Literal["L", "B"], items: Iterable[bytes]) -> list[str]:
    """Return the program's output for each input; it must exit normally for any bytes."""
    data = (kind.encode() + struct.pack("<Q", len(item)) + item for item in items)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(b"".join(data))
        run = subprocess.run([str(program), file.name], capture_output=True)
    assert run.returncode == 0, run.stderr[-3000:].decode()
    # changed bytes may be in keys too
    return run.stdout.decode(errors="replace").split("\n")[:-1]


def text_of(launches: NodeLaunches) -> str:
    """Return the program's output for inputs it understood."""
    parts: list[Any] = []
    for given in launches.inputs:
        parts += ["in", given.dtype, given.rank]
    for made in launches.outputs:
        parts += ["out", made.dtype, made.alias, *made.dims]
    parts += [f"{name}={at[0]}.{at[1]}" for name, at in sorted(launches.symbols.items())]
    parts += ["rows", launches.rows]
    for buffer in launches.workspace:
        parts += ["buffer", buffer.row_bytes, buffer.max_rows or 0]
    for kernel in launches.kernels:
        parts += ["kernel", kernel.key, kernel.threads]
    for call in launches.calls:
        parts += ["call", call.kernel, "grid", *map(_argument, call.grid)]
        parts += map(_argument, call.arguments)
    for program in launches.programs:
        parts += ["tree" if program.tree else "chain", program.max_rows or 0, *program.calls]
    return " ".join(map(str, parts))


def _argument(argument: Place | Size | float) -> str:
    if isinstance(argument, Place):
        return f"{argument.space}.{argument.index}+{argument.at}"
    if isinstance(argument, Size):
        return f"{argument.times}*{argument.of}/{argument.per}"
    return f"f{struct.unpack('<I', struct.pack('<f', argument))[0]}"
