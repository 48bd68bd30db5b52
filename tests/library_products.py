"""The products of a step of Mamba-130M by other libraries: `python -m tests.library_products`.

Prints milliseconds of CPU time of one thread for all int8 products of 1, 4 and 128 tokens, the head
for the last token of 128: by oneDNN and FBGEMM, which torch has, and by the `cpu` engine. Its time
has the convolutions too, where they are part of the kernel.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from edge.apps.bench.models import SHAPES, write_bundle
from edge.apps.measure.cpu_profile import breakdown
from edge.apps.measure.run_cost import RunKind

LAYERS, INNER, MODEL, VOCAB = 24, 1536, 768, 50280
SHAPES_OF_A_LAYER = ((MODEL, 2 * INNER), (INNER, 80), (48, INNER), (INNER, MODEL))
HEAD = (MODEL, VOCAB)
TOKENS, ROUNDS = (1, 4, 128), 12


def weights(engine: str) -> list[tuple[int, Any]]:
    """Return the columns and the packed weight of each product, all different memory."""
    torch.backends.quantized.engine = engine
    packed = []
    for columns, rows in [*SHAPES_OF_A_LAYER * LAYERS, HEAD]:
        scales, zeros = torch.full((rows,), 1e-3), torch.zeros(rows, dtype=torch.int64)
        weight = torch.quantize_per_channel(
            torch.randn(rows, columns), scales, zeros, 0, torch.qint8
        )
        packed.append((columns, torch.ops.quantized.linear_prepack(weight, None)))
    return packed


def library_ms(products: list[tuple[int, Any]], tokens: int) -> float:
    def inputs(rows: int) -> dict[int, Any]:
        return {
            columns: torch.quantize_per_tensor(torch.randn(rows, columns), 0.02, 128, torch.quint8)
            for columns in {columns for columns, _ in products}
        }

    each, last = inputs(tokens), inputs(1 if tokens == max(TOKENS) else tokens)
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for columns, weight in products[:-1]:
            torch.ops.quantized.linear(each[columns], weight, 0.05, 128)
        torch.ops.quantized.linear(last[MODEL], products[-1][1], 0.05, 128)
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def our_ms(tokens: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(
            SHAPES["130m"], "w8a8", Path(folder) / "bundle", chunk=max(TOKENS), whole=True
        )
        kind = RunKind(tokens, ROUNDS, prefill=tokens == max(TOKENS))
        ops = breakdown(bundle, 1, {"run": kind})["run"].ops
    return sum(spent for name, (spent, _) in ops.items() if name.startswith("linear"))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for engine in ("onednn", "fbgemm"):
        products = weights(engine)
        print(engine, *(f"{library_ms(products, tokens):.2f}" for tokens in TOKENS), flush=True)
    print("cpu", *(f"{our_ms(tokens):.2f}" for tokens in TOKENS))


if __name__ == "__main__":
    main()
