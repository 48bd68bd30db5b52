"""Check with one kernel, from source to numbers, whether this driver runs ahead-of-time cubins.

A driver may be older than the ptxas that made a cubin. Then bundles' kernels do not load, and this
program says so; kernels compiled here by the installed Triton may still work.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from edge.errors import EdgeError
from edge.launch import Variant
from edge.runtime.cuda.device import Device

COUNT = 1000
NEEDED = ("numpy", "onnx", "pydantic", "torch", "triton", "cuda.core")
# for the steps after this one
TESTS = ("pytest", "hypothesis", "onnxruntime", "transformers", "typer")


def main() -> int:
    """Return exit code 0 if it runs, 1 with a reason otherwise."""
    if missing := [name for name in TESTS if not _present(name)]:
        print(f"tests will lack Python packages: {' '.join(missing)}")
    if missing := [name for name in NEEDED if not _present(name)]:
        print(
            f"missing Python packages: {' '.join(missing)} (make test installs all)",
            file=sys.stderr,
        )
        return 1
    from edge.plugins.compiler.aot import compile_variants, triton_version
    from edge.runtime.cuda.core import CoreDevice

    try:
        device = CoreDevice()
        print(f"{device.name}, sm_{device.sm}, {device.multiprocessors} multiprocessors")
        variant, grid = lowered()
        made = compile_variants([variant], [device.sm])[device.sm]
        compiled = made.index.kernels[variant.key]
        print(
            f"triton {triton_version()}, ptxas {made.index.ptxas}, {compiled.registers} registers"
        )
        kernel = device.load(variant, compiled, made.cubins[compiled.file])
        if not runs(device, kernel, variant, grid):
            print("the first kernel ran, and its numbers are wrong", file=sys.stderr)
            return 1
        print("the first kernel, compiled ahead of time, runs and is right")
        return 0
    except EdgeError as problem:
        print(f"the first kernel does not run here: {problem}", file=sys.stderr)
        return 1


def _present(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def lowered() -> tuple[Variant, tuple[int, int, int]]:
    """Lower `Quantize` of a row as the exporter does; return it with its grid."""
    from edge.plugins.lowering.context import Constant, Lowering, Node, Regime, Tables
    from edge.plugins.lowering.lowerings import LOWER

    tables = Tables()
    scale = Constant("scale", "inline", "f32", (1,), lambda: np.ones(1, np.float32))
    lowering = Lowering(Regime("chain", 1), tables, {"scale": scale})
    lowering.new("x", "f32", "TB", COUNT)
    LOWER["Quantize"](lowering, Node("Quantize", "q", {"x": "x", "scale": "scale"}, {"y": "q"}, {}))
    ((_, variant),) = tables.variants.values()
    ((_, launch),) = tables.launches.values()
    x, y, z = (max(1, size.value({"T": 1, "B": 1})) for size in launch.grid)
    return variant, (x, y, z)


def runs(device: Device, kernel: Any, variant: Variant, grid: tuple[int, int, int]) -> bool:
    """Return whether the kernel rounds a row correctly."""
    row = np.linspace(-300, 300, COUNT, dtype=np.float32)
    host = device.host(4 * COUNT + 4)
    host[: 4 * COUNT] = row.view(np.uint8)
    host[4 * COUNT :] = np.full(1, 2.0, np.float32).view(np.uint8)
    memory, out = device.allocate(host.nbytes), device.allocate(COUNT)
    device.write(memory, 0, host)
    places = {"x": memory.address, "scale": memory.address + 4 * COUNT, "y": out.address}
    device.launch(kernel, grid, [places[name] for name in variant.arguments])
    back = device.host(COUNT)
    device.read(back, out, 0)
    device.wait()
    expected = np.clip(np.rint(row / 2), -128, 127).astype(np.int8)
    return np.array_equal(back.view(np.int8), expected)


if __name__ == "__main__":
    sys.exit(main())
