"""Products by AMX equal those by AVX-512 to the bit, for full tiles or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edge.plugins.cpu import library
from tests.test_cpu_interleave import (
    ROWS,
    SETS,
    Reader,
    bits_product,
    int4_product,
    int8_product,
    repack,
)

pytestmark = pytest.mark.skipif(
    "amx" not in SETS,
    reason="needs AMX (run make test on a Xeon of 2023 or later)",
)


def same_bits(make: Callable[[str], Reader]) -> None:
    """Compare the sets `amx` and `avx512`, with weights as they are and repacked."""
    tiles, vectors = make("amx"), make("avx512")
    for rows in ROWS:
        assert tiles.run(rows).tobytes() == vectors.run(rows).tobytes(), rows
    repack(tiles.all_reads())
    for rows in ROWS:
        assert tiles.run(rows).tobytes() == vectors.run(rows).tobytes(), rows


@pytest.mark.parametrize("columns", [4, 28, 60, 64, 100, 576, 1088])
@pytest.mark.parametrize("outputs", [1, 16, 33, 100])
def test_int8(columns: int, outputs: int) -> None:
    """Tiles take multiples of 64 columns; other widths fall back to vectors."""
    same_bits(lambda isa: int8_product(isa, outputs, columns))


@pytest.mark.parametrize(("bits", "minimums"), [(8, False), (4, False), (4, True)])
@pytest.mark.parametrize(("block", "outputs"), [(32, 33), (64, 48), (96, 5), (128, 100), (384, 17)])
def test_blocks(bits: int, minimums: bool, block: int, outputs: int) -> None:
    same_bits(lambda isa: bits_product(isa, bits, block, outputs, minimums=minimums))


@pytest.mark.parametrize("minimums", [False, True])
def test_int8_rows_times_4_bits(minimums: bool) -> None:
    same_bits(lambda isa: int4_product(isa, 32, 70, "float16", minimums))


def test_kernels_of_both_sets_share_a_pool() -> None:
    """Only the kernel of `amx` uses tiles."""
    pool = library.library().edge_cpu_pool(2, 1, 0)
    readers = [int8_product(isa, 33, 576) for isa in ("amx", "avx512", "amx")]
    found = [reader.run(49, pool).tobytes() for reader in readers]
    library.library().edge_cpu_pool_free(pool)
    assert found == [readers[1].run(49).tobytes()] * 3
