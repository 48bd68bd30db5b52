"""Weights repacked at load give the same sums, and only where every reader can use them."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.plugins.cpu import library
from edge.plugins.cpu.library import CallValue, CpuCall, CpuKernel, CpuReader

pytestmark = pytest.mark.skipif(
    library.path() is None,
    reason="needs the kernels for CPUs (run make test where there is a C++ compiler)",
)
Array = NDArray[Any]
TURNS = ("avx512", "amx")  # the sets in which outputs lie side by side before, too
# the sets that benefit with int8 weights, and in blocks
BYTES = ("avxvnni", *TURNS)
REPACKS = ("avx2", *BYTES)
FEW = 16  # rows that are multiplied as one is
TYPES = {"float32": "*fp32", "float16": "*fp16", "int8": "*i8", "uint8": "*u8", "int32": "*i32"}
ROWS = (1, 2, 3, 5, 8, 11, 16, 17, 29, 32, 49)
SETS = library.instruction_sets() if library.path() else ()
each_set = pytest.mark.parametrize("isa", SETS)


@dataclasses.dataclass
class Reader:
    """A kernel and its inputs; `weights` are those of its arrays that may be repacked."""

    name: str
    arrays: dict[str, Array]
    weights: tuple[str, ...]
    constants: Mapping[str, Any]
    isa: str

    def __post_init__(self) -> None:
        lines = [f"kernel {self.name}"]
        lines += [f"argument {n} {TYPES[a.dtype.name]}" for n, a in self.arrays.items()]
        lines.append("argument M i32")
        lines += [f"constant {n} {'' if v is None else v}" for n, v in self.constants.items()]
        self.kernel = CpuKernel("\n".join(lines), self.isa)

    def reads(self, name: str, place: int | None = None) -> CpuReader:
        at, array = list(self.arrays).index(name), self.arrays[name]
        place = at if place is None else place
        return CpuReader(self.kernel.handle, place, array.ctypes.data, array.nbytes)

    def all_reads(self) -> list[CpuReader]:
        return [self.reads(name) for name in self.weights]

    def run(self, rows: int, pool: int | None = None) -> Array:
        self.arrays["y"].fill(77)
        addresses = (CallValue(address=a.ctypes.data) for a in self.arrays.values())
        values = (CallValue * (len(self.arrays) + 1))(*addresses)
        values[len(self.arrays)] = CallValue(integer=rows)
        call = CpuCall(self.kernel.handle, values, (rows, 1, 1))
        own = pool is None and library.library().edge_cpu_pool(2, 1, 0)
        library.library().edge_cpu_run(pool or own, ctypes.byref(call), 1)
        if own:
            library.library().edge_cpu_pool_free(own)
        return self.arrays["y"][:rows].copy()

    def twin(self) -> Reader:
        """Return a copy with its own memory."""
        copies = {name: array.copy() for name, array in self.arrays.items()}
        return dataclasses.replace(self, arrays=copies)


def repack(readers: Sequence[CpuReader]) -> None:
    assert not library.library().edge_cpu_interleave(
        (CpuReader * len(readers))(*readers), len(readers)
    )


def bits_product(
    isa: str, bits: int, block: int, outputs: int, columns: int = 384, kind: str = "float32",
    minimums: bool = False,
) -> Reader:  # fmt: skip
    rng = np.random.default_rng(outputs)
    units = {"scales": rng.uniform(0, 1, (outputs, columns // block)).astype(kind)}
    if minimums:
        units["minimums"] = -rng.uniform(0, 8, units["scales"].shape).astype(kind)
    arrays = {
        "x": rng.uniform(-1, 1, (max(ROWS), columns)).astype(np.float32),
        "packed": rng.integers(0, 256, (outputs, columns * bits // 8)).astype(np.uint8),
        **units,
        "y": np.zeros((max(ROWS), outputs), np.float32),
    }
    constants = {"BITS": bits, "K": columns, "N": outputs, "SHARED": block, "X_STRIDE": columns}
    return Reader("linear_bits.few", arrays, ("packed", *units), constants, isa)


def int4_product(isa: str, block: int, outputs: int, kind: str, minimums: bool) -> Reader:
    made = bits_product(isa, 4, block, outputs, kind=kind, minimums=minimums)
    rows = np.random.default_rng(block).integers(-128, 128, made.arrays["x"].shape)
    rows[:2] = [[-128], [127]]  # the largest sums there are
    made.arrays["packed"][:2] = [[0xFF], [0]]
    scale = np.full(1, 0.01, np.float32)
    arrays = {"x": rows.astype(np.int8), "x_scale": scale}
    arrays |= {name: array for name, array in made.arrays.items() if name != "x"}
    constants = {k: v for k, v in made.constants.items() if k != "BITS"}
    constants |= {"Y_SCALE_STEP": 0, "y_scale": None}
    return Reader("linear_int4.few", arrays, made.weights, constants, isa)


def int8_product(isa: str, outputs: int, columns: int) -> Reader:
    rng = np.random.default_rng(outputs)
    arrays = {
        "x": rng.integers(-128, 128, (max(ROWS), columns)).astype(np.int8),
        "weight": rng.integers(-128, 128, (outputs, columns)).astype(np.int8),
        "x_scale": np.ones(1, np.float32),
        "weight_scale": rng.uniform(0, 1, outputs).astype(np.float32),
        "y": np.zeros((max(ROWS), outputs), np.float32),
    }
    constants = {
        "N": outputs, "K": columns, "X_STRIDE": columns, "X_SCALE_STEP": 0, "WEIGHT_SCALE_STEP": 1,
        "Y_SCALE_STEP": 0, "y_scale": None,
    }  # fmt: skip
    return Reader("linear_int8.few", arrays, ("weight",), constants, isa)


def same_sums(found: Array, wanted: Array, isa: str) -> None:
    """Compare bits, or numbers where lanes held parts of an output before: their sums were rounded
    otherwise.
    """
    if isa in REPACKS and isa not in TURNS:
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    else:
        assert found.tobytes() == wanted.tobytes()


def same_from_repacked(reader: Reader) -> None:
    """Check that a reader gives the same sums once its weights are repacked, and each of few rows
    the bits it has alone.
    """
    twin = reader.twin()
    repack(twin.all_reads())
    for name in reader.weights:
        array = reader.arrays[name]
        words = array[0].nbytes // (4 if array.itemsize == 1 else array.itemsize)
        moved = twin.arrays[name].tobytes() != array.tobytes()
        sets = BYTES if name == "weight" else REPACKS
        assert moved == (reader.isa in sets and words > 1)
    alone, x = [], twin.arrays["x"]
    first = x[0].copy()
    for row in range(FEW):
        x[0] = reader.arrays["x"][row]
        alone.append(twin.run(1)[0])
    x[0] = first
    for rows in ROWS:
        found = twin.run(rows)
        same_sums(found, reader.run(rows), reader.isa)
        assert rows > FEW or found.tobytes() == np.array(alone[:rows]).tobytes()


@each_set
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("block", "outputs"), [(32, 33), (64, 48), (128, 5), (384, 100)])
def test_products_in_blocks(isa: str, bits: int, block: int, outputs: int) -> None:
    """Numbers of rows for every tile; outputs that do not fill a group, and more than one panel."""
    same_from_repacked(bits_product(isa, bits, block, outputs))


@each_set
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_products_with_minimums(isa: str, kind: str) -> None:
    same_from_repacked(bits_product(isa, 4, 32, 39, kind=kind, minimums=True))


@each_set
@pytest.mark.parametrize(
    ("kind", "minimums"), [("float32", False), ("float32", True), ("float16", True)]
)
@pytest.mark.parametrize(("block", "outputs"), [(32, 39), (64, 48), (128, 5), (24, 17)])
def test_int4_products(isa: str, block: int, outputs: int, kind: str, minimums: bool) -> None:
    """With int8 rows. Each row of a run gives what it gives alone, and what integers give."""
    reader = int4_product(isa, block, outputs, kind, minimums)
    arrays = reader.arrays
    x, packed = arrays["x"].astype(np.float64), arrays["packed"]
    low = np.stack([packed & 15, packed >> 4], -1).reshape(outputs, -1, block).astype(np.float64)
    least = arrays["minimums"].astype(np.float64)[..., None] if minimums else 0
    units = arrays["scales"].astype(np.float64)[..., None]
    weight = ((low - (0 if minimums else 8)) * units + least).reshape(outputs, -1)
    expected = (x @ weight.T) * float(arrays["x_scale"][0])
    whole = reader.run(max(ROWS))
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())
    for rows in range(1, 17):
        few = reader.run(rows)
        for row in (0, rows - 1):
            alone = reader.twin()
            alone.arrays["x"][0] = reader.arrays["x"][row]
            assert alone.run(1).tobytes() == few[row].tobytes(), (rows, row)
    if isa in REPACKS and block % 32 == 0:  # a chunk too sums in the order of few rows
        if isa not in TURNS:
            beside = reader.twin()
            repack(beside.all_reads())
            few, whole = beside.run(16), beside.run(max(ROWS))
        assert few.tobytes() == whole[:16].tobytes()
    if block % 32 == 0:
        same_from_repacked(reader)


@each_set
@pytest.mark.parametrize(
    ("outputs", "columns"), [(33, 64), (100, 48), (16, 1540), (7, 4), (250, 384)]
)
def test_int8_products(isa: str, outputs: int, columns: int) -> None:
    """Columns that do not fill whole vectors."""
    same_from_repacked(int8_product(isa, outputs, columns))


def float_product(isa: str, kind: str, outputs: int, columns: int) -> Reader:
    rng = np.random.default_rng(outputs)
    arrays = {
        "x": rng.uniform(-1, 1, (max(ROWS), columns)).astype(np.float32),
        "weight": rng.uniform(-1, 1, (outputs, columns)).astype(kind),
        "y": np.zeros((max(ROWS), outputs), np.float32),
    }
    constants = {"N": outputs, "K": columns, "X_STRIDE": columns}
    return Reader("linear.few", arrays, ("weight",), constants, isa)


def near_the_exact(product: Reader, weight: Array, found: Array) -> None:
    """Compare with exact sums of the multiplied values: x itself, or rounded to fp16 for fp16
    weights.
    """
    x = product.arrays["x"][: len(found)].astype(weight.dtype).astype(np.float64)
    exact = x @ weight.astype(np.float64).T
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6 * weight.shape[1] ** 0.5)


@each_set
@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize(("outputs", "columns"), [(33, 48), (100, 37), (7, 3), (250, 160)])
def test_float_products(isa: str, kind: str, outputs: int, columns: int) -> None:
    """The layout is the same in every set, and no lanes are summed: near the exact sums, and each
    row of a run gets the bits it gets alone.
    """
    reader = float_product(isa, kind, outputs, columns)
    weight = reader.arrays["weight"].copy()
    repack(reader.all_reads())
    assert reader.arrays["weight"].tobytes() != weight.tobytes()
    for rows in ROWS:
        found = reader.run(rows)
        near_the_exact(reader, weight, found)
        for row in {0, rows - 1} if rows <= 16 else ():
            alone = dataclasses.replace(reader, arrays=dict(reader.arrays))
            alone.kernel.read_alike(reader.kernel)
            alone.arrays["x"] = reader.arrays["x"][row : row + 1].copy()
            assert alone.run(1).tobytes() == found[row].tobytes(), (rows, row)


@each_set
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_table_of_floats_that_is_a_head_as_well(isa: str, kind: str) -> None:
    head = float_product(isa, kind, 37, 50)
    weight, table = head.arrays["weight"].copy(), embedding(isa, head)
    table.arrays["table"] = head.arrays["weight"]
    count = len(table.arrays["tokens"])
    before = table.run(count)
    repack([*head.all_reads(), *table.all_reads()])
    assert head.arrays["weight"].tobytes() != weight.tobytes()
    assert table.run(count).tobytes() == before.tobytes()
    for rows in ROWS:
        near_the_exact(head, weight, head.run(rows))


def embedding(isa: str, head: Reader, bits: int = 8) -> Reader:
    vocabulary, width = head.constants["N"], head.constants["K"]
    tokens = np.asarray([0, vocabulary - 1, 15, 16, 3], np.int32) % vocabulary
    table = {name: head.arrays[name] for name in head.weights}
    y = np.zeros((len(tokens), width), np.float32)
    if "weight" in table:
        arrays = {"tokens": tokens, "table": table["weight"], "y": y}
        constants = {"D": width, "SCALE_STEP": 0, "scale": None}
        return Reader("embed.embed", arrays, ("table",), constants, isa)
    constants = {"D": width, "BITS": bits, "SHARED": head.constants["SHARED"]}
    arrays = {"tokens": tokens, **table, "y": y}
    return Reader("embed.embed_bits", arrays, ("packed", "scales"), constants, isa)


@each_set
@pytest.mark.parametrize("bits", [8, 4, None])
def test_a_table_that_is_a_head_as_well(isa: str, bits: int | None) -> None:
    """Its rows are found in the new layout. Without the product the number of rows is unknown."""
    head = int8_product(isa, 37, 128) if bits is None else bits_product(isa, bits, 32, 37, 128)
    table = embedding(isa, head, bits or 8)
    count, before = len(table.arrays["tokens"]), table.run(len(table.arrays["tokens"]))
    alone = table.twin()
    repack(alone.all_reads())
    assert alone.run(count).tobytes() == before.tobytes()
    for name in alone.weights:
        assert alone.arrays[name].tobytes() == table.arrays[name].tobytes()
    twin = head.twin()
    names = dict(zip(table.weights, head.weights, strict=True))
    tied = table.twin()
    tied.arrays |= {mine: twin.arrays[theirs] for mine, theirs in names.items()}
    repack([*twin.all_reads(), *tied.all_reads()])
    moved = twin.arrays[head.weights[0]].tobytes() != head.arrays[head.weights[0]].tobytes()
    assert moved == (isa in (BYTES if bits is None else REPACKS))
    assert tied.run(count).tobytes() == before.tobytes()
    for rows in ROWS:
        same_sums(twin.run(rows), head.run(rows), isa)


@each_set
def test_what_others_read_stays(isa: str) -> None:
    """Arrays read by an unable kernel, from an offset, as other rows, or in part stay as they are;
    then nothing else that the kernel reads is repacked either.
    """
    product, wider = int8_product(isa, 32, 64), int8_product(isa, 16, 128)
    other = dataclasses.replace(product.twin(), name="linear_int8.many")
    weight = product.arrays["weight"]
    product_reads, foreign = product.reads("weight"), wider.reads("weight")
    foreign.weight = weight.ctypes.data
    behind = product.reads("weight", place=-1)
    inside = CpuReader(wider.kernel.handle, 1, weight.ctypes.data + 64, 16 * 128)
    short = CpuReader(product.kernel.handle, 1, weight.ctypes.data, weight.nbytes - 64)
    second = CpuReader(product.kernel.handle, 1, other.arrays["weight"].ctypes.data, weight.nbytes)
    stays = [each.arrays["weight"].tobytes() for each in (product, other, wider)]
    for wrong in (foreign, behind, inside, short):
        repack([product_reads, second, wrong])
        for reader, before in zip((product, other, wider), stays, strict=True):
            assert reader.arrays["weight"].tobytes() == before
    for rows in (1, 17):
        assert product.run(rows).tobytes() == other.run(rows).tobytes()


@each_set
def test_sizes_that_no_memory_has_are_refused(isa: str) -> None:
    """A plan states a weight's rows: products of them that overflow, or are negative."""
    reader = float_product(isa, "float32", 16, 4)
    before = reader.arrays["weight"].tobytes()
    for outputs, columns in ((1 << 48, 1 << 13), (1 << 33, 1 << 31), (-16, -4), (-1, 4), (16, -4)):
        constants = {"N": outputs, "K": columns, "X_STRIDE": 4}
        wrong = dataclasses.replace(reader, constants=constants)
        for reads in ([wrong.reads("weight")], [reader.reads("weight"), wrong.reads("weight")]):
            array = (CpuReader * len(reads))(*reads)
            assert library.library().edge_cpu_interleave(array, len(reads)) == 2, constants
    for size in ((1 << 48) + 1, 1 << 63, 1 << 64, "4x", "-"):
        with pytest.raises(EngineError, match="K is not a size"):
            dataclasses.replace(reader, constants={"N": 16, "K": size, "X_STRIDE": 4})
    assert reader.arrays["weight"].tobytes() == before


@each_set
def test_a_part_of_a_kernel_reads_alike(isa: str) -> None:
    """As for the product of a pair, which steps of several states run separately."""
    product = int8_product(isa, 50, 64)
    twin = product.twin()
    apart = dataclasses.replace(twin)
    repack(twin.all_reads())
    apart.kernel.read_alike(twin.kernel)
    for rows in ROWS:
        assert apart.run(rows).tobytes() == product.run(rows).tobytes()
