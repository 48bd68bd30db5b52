"""Compile what tests and models launch for a GPU that is elsewhere: `tests/gpu/pack.sh`.

    python -m tests.gpu.precompile VARIANTS OUT SM

VARIANTS is a folder of `Variant`s as EDGE_TEST_VARIANTS makes it, OUT what EDGE_PRECOMPILED names
on the other machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge.launch import Variant
from edge.plugins.compiler import cache
from edge.plugins.compiler.aot import compile_variants, triton_version


def main(variants: Path, out: Path, sm: int) -> None:
    """What is in OUT already, and still true, is not compiled again."""
    every = [Variant.model_validate_json(file.read_bytes()) for file in variants.glob("*.json")]
    out.mkdir(parents=True, exist_ok=True)
    compile_variants(every, [sm], _shown)
    names = {cache.precompiled(each, sm): cache.entry(each, sm, triton_version()) for each in every}
    for file in out.iterdir():
        if file.name not in names:
            file.unlink()
    for name, kept in names.items():
        (out / name).write_bytes(kept.read_bytes())
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{len(names)} kernels for sm_{sm}, {size / 1e6:.1f} MB, by Triton {triton_version()}")


def _shown(done: int, total: int) -> None:
    if done % 50 == 0 or done == total:
        print(f"{done} of {total} kernels", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
