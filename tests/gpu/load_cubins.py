"""Load every kernel of EDGE_PRECOMPILED, to see whether this driver accepts them.

A driver older than the ptxas that made a cubin may refuse it; then kernels are compiled here.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

from edge.plugins.compiler import cache
from edge.runtime.cuda.core import CoreDevice


def main() -> int:
    """Return exit code 1 if any is refused; each refusal is printed once, with its count."""
    folder = os.environ.get(cache.PRECOMPILED)
    if not folder:
        print(f"{cache.PRECOMPILED} names no folder: kernels will be compiled here")
        return 0
    from cuda.core import ObjectCode

    device = CoreDevice()
    refused: Counter[str] = Counter()
    makers: Counter[str] = Counter()
    files = sorted(Path(folder).iterdir())
    for file in files:
        made = cache.read(file)
        if made is None:
            refused["damaged"] += 1
            continue
        makers[made.ptxas] += 1
        try:
            ObjectCode.from_cubin(made.cubin).get_kernel(made.kernel.symbol)
        except Exception as problem:  # every error of the driver is counted
            refused[f"{type(problem).__name__}: {problem}"] += 1
    by = ", ".join(f"{count} by ptxas {name}" for name, count in makers.items())
    print(f"{device.name}: {len(files) - refused.total()} of {len(files)} kernels load ({by})")
    for why, count in refused.most_common():
        print(f"  {count} refused: {why}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
