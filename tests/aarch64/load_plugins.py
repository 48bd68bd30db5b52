"""Check the plugin library on its target machine, without TensorRT: it loads and reads kernels.

python -m tests.aarch64.load_plugins LIBRARY
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge.errors import EngineError
from edge.launch import CompiledKernel
from edge.plugins.tensorrt import blob
from edge.runtime.tensorrt.library import open_library


def main(path: str) -> None:
    library = open_library(Path(path).absolute())
    known = CompiledKernel(file="f", symbol="s", shared_bytes=0, scratch=0)
    packed = blob.pack(87, {"k-0": (known, b"\x7fELF of nothing")})
    library.prepare(packed, aliased=False)
    try:
        library.prepare(packed[:-1], aliased=False)
    except EngineError as problem:
        print(f"ok: the plugin library for TensorRT {library.built_for} loads; {problem.message}")
        return
    raise AssertionError("damaged kernels were taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
