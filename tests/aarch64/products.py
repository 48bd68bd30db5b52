"""Check products and rotations with this processor's instructions against plain NumPy.

python -m tests.aarch64.products     on every available instruction set; needs no torch
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
from numpy.typing import NDArray

from edge.plugins.cpu.library import (
    CallValue,
    CpuCall,
    CpuKernel,
    CpuReader,
    instruction_sets,
    library,
)

# K of 384 is one block of every size; 29 rows reach the kernel for many rows
BLOCKS, ROWS, OUTPUTS, COLUMNS = (16, 32, 64, 128), (1, 3, 17, 29), (33, 48), 384
# rotations: the factor of slow left after doubling has order 3 or 1, or nothing comes from doubling
ROTATIONS = ((24, 64), (8, 32), (5, 12))


def call(kernel: CpuKernel, arrays: list[NDArray], rows: int) -> None:
    """Call a kernel with these arrays and a number of rows."""
    values = (CallValue * (len(arrays) + 1))(*(CallValue(address=a.ctypes.data) for a in arrays))
    values[len(arrays)] = CallValue(integer=rows)
    made = CpuCall(kernel.handle, values, (rows, 1, 1))
    pool = library().edge_cpu_pool(2, 1, 0)
    library().edge_cpu_run(pool, ctypes.byref(made), 1)
    library().edge_cpu_pool_free(pool)


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
    call(kernel, [*arrays, y], rows)
    return y


def int8_product(
    name: str, x: NDArray[np.int8], w: NDArray[np.int8], scale: NDArray
) -> NDArray[np.float32]:
    """`linear_int8` of rows x [M, K] and weights w [N, K], which have a scale each: y [M, N]."""
    (rows, columns), outputs = x.shape, len(w)
    lines = [f"kernel linear_int8.{'many' if rows > 16 else 'few'}", "argument x *i8"]
    lines += ["argument weight *i8", "argument x_scale *fp32", "argument weight_scale *fp32"]
    lines += ["argument y *fp32", "argument M i32", f"constant K {columns}"]
    lines += [f"constant N {outputs}", f"constant X_STRIDE {columns}", "constant X_SCALE_STEP 0"]
    lines += ["constant WEIGHT_SCALE_STEP 1", "constant Y_SCALE_STEP 0", "constant y_scale "]
    y = np.zeros((rows, outputs), np.float32)
    call(CpuKernel("\n".join(lines), name), [x, w, np.ones(1, np.float32), scale, y], rows)
    return y


def plain(
    block: int, x: NDArray[np.float32], w: NDArray[np.int64], scales: NDArray
) -> NDArray[np.float64]:
    """Compute the same in integers: each block of x is rounded with its own int8 scale."""
    blocks = x.reshape(len(x), -1, block)
    step = np.abs(blocks).max(-1) / np.float32(127)
    rounded = np.rint(blocks / step[..., None]).astype(np.int64)
    sums = np.einsum("mbk,nbk->mnb", rounded, w.reshape(len(w), -1, block))
    return (sums * step[:, None].astype(np.float64) * scales[None]).sum(-1)


def floats(name: str, x: NDArray[np.float32], weight: NDArray) -> NDArray[np.float32]:
    """Multiply x [M, K] by a float weight [N, K], which is repacked first."""
    (rows, columns), outputs = x.shape, len(weight)
    kind = "fp16" if weight.dtype == np.float16 else "fp32"
    lines = ["kernel linear.few", "argument x *fp32", f"argument weight *{kind}"]
    lines += ["argument y *fp32", "argument M i32", f"constant K {columns}"]
    lines += [f"constant N {outputs}", f"constant X_STRIDE {columns}"]
    kernel, weight = CpuKernel("\n".join(lines), name), weight.copy()
    reader = CpuReader(kernel.handle, 1, weight.ctypes.data, weight.nbytes)
    assert not library().edge_cpu_interleave(ctypes.byref(reader), 1)
    y = np.zeros((rows, outputs), np.float32)
    call(kernel, [x, weight, y], rows)
    return y


def rotation(name: str, x: NDArray[np.float32], slow: NDArray, fast: NDArray) -> NDArray:
    """Return slow · x · fast for each x [M, P, Q]."""
    rows, p, q = x.shape
    lines = ["kernel hadamard.hadamard"]
    lines += [f"argument {each} *fp32" for each in ("x", "slow", "fast", "y")]
    lines += ["constant scale ", "constant SCALES 0", f"constant P {p}", f"constant Q {q}"]
    kernel, y = CpuKernel("\n".join([*lines, f"constant X_STRIDE {p * q}"]), name), np.zeros_like(x)
    call(kernel, [x, slow, fast, y], rows)
    return y


def doubled(order: int) -> NDArray[np.float32]:
    """Double [[1, 1], [1, -1]] as often as it divides `order`, around random numbers."""
    sign, power = np.ones((1, 1)), order & -order
    while len(sign) < power:
        sign = np.kron([[1, 1], [1, -1]], sign)
    left = np.random.default_rng(order).uniform(-1, 1, (order // power, order // power))
    return np.kron(left, sign).astype(np.float32)


def check(case: str, found: NDArray, wanted: NDArray) -> None:
    worst = np.abs(found - wanted).max() / np.abs(wanted).max()
    if not worst < 1e-5:
        raise AssertionError(f"{case}: differs by {worst:.2g} of the largest")


def check_floats(name: str, random: np.random.Generator) -> None:
    for kind, rows, outputs, columns in itertools.product(
        (np.float32, np.float16), ROWS, OUTPUTS, (37, 48)
    ):
        x = random.uniform(-1, 1, (rows, columns)).astype(kind).astype(np.float32)
        weight = random.uniform(-1, 1, (outputs, columns)).astype(kind)
        wanted = x.astype(np.float64) @ weight.astype(np.float64).T
        check(f"{name}: {weight.dtype}, {rows} rows", floats(name, x, weight), wanted)


def check_int8(name: str, random: np.random.Generator) -> None:
    """Sums are exact, so that every bit is known. 100 columns are an odd number of words."""
    for rows, outputs, columns in itertools.product(ROWS, OUTPUTS, (37, 100, 384)):
        x, w = (random.integers(-128, 128, (n, columns)).astype(np.int8) for n in (rows, outputs))
        scale = random.uniform(0.001, 0.01, outputs).astype(np.float32)
        wanted = (x.astype(np.int64) @ w.T.astype(np.int64)).astype(np.float32) * scale
        if not np.array_equal(int8_product(name, x, w, scale), wanted):
            raise AssertionError(f"{name}: int8, {rows} rows, {outputs} outputs, {columns} columns")


def check_rotations(name: str, random: np.random.Generator) -> None:
    for (p, q), altered in itertools.product(ROTATIONS, (False, True)):
        x = random.uniform(-1, 1, (3, p, q)).astype(np.float32)
        slow, fast = doubled(p), doubled(q)
        fast[-1, 0] += altered
        wanted = slow.astype(np.float64) @ x @ fast.astype(np.float64)
        check(f"{name}: rotated by {p} x {q}", rotation(name, x, slow, fast), wanted)


def main() -> None:
    random = np.random.default_rng(0)
    for name in instruction_sets():
        for bits, block, rows, outputs in itertools.product((8, 4), BLOCKS, ROWS, OUTPUTS):
            x = random.uniform(-1, 1, (rows, COLUMNS)).astype(np.float32)
            top = 1 << (bits - 1)
            w = random.integers(-top, top, (outputs, COLUMNS))
            scales = random.uniform(0.001, 0.01, (outputs, COLUMNS // block)).astype(np.float32)
            found, wanted = product(name, bits, block, x, w, scales), plain(block, x, w, scales)
            case = f"{name}: {bits} bits, blocks of {block}, {rows} rows, {outputs} outputs"
            check(case, found, wanted)
        check_int8(name, random)
        check_floats(name, random)
        check_rotations(name, random)
    print("ok: products and rotations on", ", ".join(instruction_sets()))


if __name__ == "__main__":
    main()
