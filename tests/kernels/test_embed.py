"""Embedding tables as kernels, against the references: identical numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge.plugins.embedding.reference import embed_int8
from edge.plugins.linear.reference import dequantize_bits
from edge.plugins.lowering.lowerings import LOWER
from tests.kernels.rowwise import CHAIN, MANY, Workbench

VOCABULARY = 37


def _bench(steps: int, batch: int, **constants: Tensor) -> tuple[Workbench, Tensor]:
    make = torch.Generator().manual_seed(steps)
    bench = Workbench(CHAIN if steps * batch <= 16 else MANY, T=steps, B=batch, L=0)
    tokens = torch.randint(VOCABULARY, (steps * batch,), generator=make, dtype=torch.int32)
    tokens[-1] = VOCABULARY - 1
    bench.given("input", "tokens", tokens)
    for name, array in constants.items():
        bench.constant(name, array)
    return bench, tokens.long()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("steps", "batch", "width"), [(1, 1, 1160), (7, 3, 33)])
def test_floating_tables(steps: int, batch: int, width: int, dtype: torch.dtype) -> None:
    table = torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    bench, tokens = _bench(steps, batch, table=table)
    bench.lower(LOWER, "Embed", ("tokens", "table"), ("y",))
    bench.run()
    assert torch.equal(bench.read("y"), table[tokens].float())


@pytest.mark.parametrize("scales", [1, VOCABULARY])
@pytest.mark.parametrize(("steps", "batch", "width"), [(1, 1, 1160), (7, 3, 33)])
def test_int8_tables(steps: int, batch: int, width: int, scales: int) -> None:
    make = torch.Generator().manual_seed(1)
    table = torch.randint(-128, 128, (VOCABULARY, width), generator=make, dtype=torch.int8)
    scale = torch.rand(scales, generator=make)
    bench, tokens = _bench(steps, batch, table=table, scale=scale)
    bench.lower(LOWER, "EmbedInt8", ("tokens", "table", "scale"), ("y",))
    bench.run()
    assert torch.equal(bench.read("y"), embed_int8(tokens, table, scale))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("steps", "width", "block"), [(1, 1152, 32), (5, 1160, 40), (20, 64, 64)])
def test_tables_of_blocks(steps: int, width: int, block: int, bits: int) -> None:
    make = torch.Generator().manual_seed(2)
    shape = (VOCABULARY, width // block, block * bits // 8)
    packed = torch.randint(256, shape, generator=make, dtype=torch.uint8)
    scales = torch.randn(shape[:2], generator=make)
    bench, tokens = _bench(steps, 1, packed=packed, scales=scales)
    sizes = {"K": width, "N": VOCABULARY, "bits": bits, "block_size": block}
    bench.lower(LOWER, "EmbedBits", ("tokens", "packed", "scales"), ("y",), **sizes)
    bench.run()
    assert torch.equal(bench.read("y"), dequantize_bits(packed, scales, bits)[tokens])
