"""Compile the kernels of tests and models for a GPU elsewhere: `tests/gpu/pack.sh`.

    python -m tests.gpu.precompile VARIANTS OUT SM

VARIANTS is a folder of `Variant`s as EDGE_TEST_VARIANTS and `tests.gpu.variants` write it; OUT is
the folder for EDGE_PRECOMPILED on the other machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge.plugins.compiler import cache
from edge.plugins.compiler.aot import compile_variants
from edge.plugins.compiler.pool import Compiled
from tests.gpu.variants import read


def main(variants: Path, out: Path, sm: int) -> None:
    """Leave exactly these kernels in OUT."""
    every = read(variants)
    out.mkdir(parents=True, exist_ok=True)
    made = compile_variants(every, [sm], _shown)[sm]
    names = {cache.precompiled(each, sm): made.get(each) for each in every}
    for file in out.iterdir():
        if file.name not in names:
            file.unlink()
    for name, (kernel, cubin) in names.items():
        cache.write(out / name, Compiled(kernel, made.index.ptxas, cubin))
        assert (out / name).exists(), f"{out} cannot be written"
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{len(names)} kernels for sm_{sm}, {size / 1e6:.1f} MB, by Triton {made.index.triton}")


def _shown(done: int, total: int) -> None:
    if done % 50 == 0 or done == total:
        print(f"{done} of {total} kernels", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
