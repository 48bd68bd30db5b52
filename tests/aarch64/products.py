"""Products of 8- and 4-bit weights by the instructions of this processor, against plain ones.

python -m tests.aarch64.products     on every instruction set there is; needs no torch
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
from numpy.typing import NDArray

from edge.plugins.cpu.library import CallValue, CpuCall, CpuKernel, instruction_sets, library

# K of 384 is one block of every size; 29 rows are of the kernel for many
BLOCKS, ROWS, OUTPUTS, COLUMNS = (16, 32, 64, 128), (1, 3, 17, 29), (33, 48), 384


def product(
    name: str, bits: int, block: int, x: NDArray[np.float32], w: NDArray[np.int64], scales: NDArray
) -> NDArray[np.float32]:
    """`linear_bits` of rows x [M, K] and weights w [N, K] with scales [N, K / block]: y [M, N]."""
    rows, outputs = len(x), len(w)
    stored = (w + (1 << (bits - 1))).astype(np.uint8)
    if bits == 4:
        stored = stored[:, ::2] | stored[:, 1::2] << 4
    y = np.zeros((rows, outputs), np.float32)
    lines = [f"kernel linear_bits.{'many' if rows > 16 else 'few'}"]
    lines += [f"argument {a} *{t}" for a, t in (("x", "fp32"), ("packed", "u8"))]
    lines += ["argument scales *fp32", "argument y *fp32", "argument M i32"]
    lines += [f"constant BITS {bits}", f"constant K {COLUMNS}", f"constant N {outputs}"]
    lines += [f"constant SHARED {block}", f"constant X_STRIDE {COLUMNS}"]
    kernel = CpuKernel("\n".join(lines), name)
    arrays = [np.ascontiguousarray(each) for each in (x, stored, scales)]
    values = (CallValue * 5)(*(CallValue(address=each.ctypes.data) for each in (*arrays, y)))
    values[4] = CallValue(integer=rows)
    call = CpuCall(kernel.handle, values, (1, 1, 1))
    pool = library().edge_cpu_pool(2, 1)
    library().edge_cpu_run(pool, ctypes.byref(call), 1)
    library().edge_cpu_pool_free(pool)
    return y


def plain(
    block: int, x: NDArray[np.float32], w: NDArray[np.int64], scales: NDArray
) -> NDArray[np.float64]:
    """The same in whole numbers: each block of x is rounded to its own int8 scale."""
    blocks = x.reshape(len(x), -1, block)
    step = np.abs(blocks).max(-1) / np.float32(127)
    rounded = np.rint(blocks / step[..., None]).astype(np.int64)
    sums = np.einsum("mbk,nbk->mnb", rounded, w.reshape(len(w), -1, block))
    return (sums * step[:, None].astype(np.float64) * scales[None]).sum(-1)


def main() -> None:
    random = np.random.default_rng(0)
    for name in instruction_sets():
        for bits, block, rows, outputs in itertools.product((8, 4), BLOCKS, ROWS, OUTPUTS):
            x = random.uniform(-1, 1, (rows, COLUMNS)).astype(np.float32)
            top = 1 << (bits - 1)
            w = random.integers(-top, top, (outputs, COLUMNS))
            scales = random.uniform(0.001, 0.01, (outputs, COLUMNS // block)).astype(np.float32)
            found, wanted = product(name, bits, block, x, w, scales), plain(block, x, w, scales)
            worst = np.abs(found - wanted).max() / np.abs(wanted).max()
            if not worst < 1e-5:
                case = f"{name}: {bits} bits, blocks of {block}, {rows} rows, {outputs} outputs"
                raise AssertionError(f"{case}: differs by {worst:.2g} of the largest")
    print("ok: products of 8 and 4 bits on", ", ".join(instruction_sets()))


if __name__ == "__main__":
    main()
