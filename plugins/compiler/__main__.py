"""`python -m edge.plugins.compiler PLAN.json --sm 87,89 [--table]`: compile a plan's kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from edge.errors import EdgeError
from edge.launch import LaunchPlan, Variant
from edge.plugins.compiler.aot import Kernels, compile_variants


def main() -> int:
    """Return 0, or 1 when a kernel uses local memory or cannot be compiled."""
    parser = argparse.ArgumentParser(prog="python -m edge.plugins.compiler", description=__doc__)
    parser.add_argument("plan", type=Path, help="graphs/cuda.json of a bundle")
    parser.add_argument("--sm", default="87", help="architectures: 87 or 75,87,120")
    parser.add_argument("--table", action="store_true", help="a line for each kernel")
    options = parser.parse_args()
    try:
        plan = LaunchPlan.model_validate_json(options.plan.read_bytes(), strict=True)
        built = compile_variants(plan.variants, [int(sm) for sm in options.sm.split(",")])
    except (EdgeError, ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if options.table:
        print(table(plan.variants, built))
    spilled = False
    for sm, kernels in built.items():
        compiled = kernels.index.kernels.values()
        spilling = [kernel.file for kernel in compiled if kernel.local_bytes]
        size = sum(map(len, kernels.cubins.values()))
        print(
            f"sm_{sm}: {len(compiled)} kernels, {size:,} bytes, {len(spilling)} with local memory"
        )
        spilled = spilled or bool(spilling)
    return int(spilled)


def table(variants: tuple[Variant, ...], built: Mapping[int, Kernels]) -> str:
    """Format one line per variant and architecture; constants tell a kernel's variants apart."""
    rows = ["  sm  warps  registers  local  shared     size  kernel"]
    for variant in sorted(variants, key=lambda v: (v.kernel, v.key)):
        constants = " ".join(f"{name}={value}" for name, value in variant.constants.items())
        for sm, kernels in built.items():
            kernel = kernels.index.kernels[variant.key]
            rows.append(
                f"{sm:4}  {variant.warps:5}  {kernel.registers:9}  {kernel.local_bytes:5}  "
                f"{kernel.shared_bytes:6}  {len(kernels.cubins[kernel.file]):7}  "
                f"{variant.kernel} {constants}"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
