"""Requirements on the machine code: read from the cubins of a Mamba-130M, no GPU needed."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from edge.apps.bench.models import MODELS, write_bundle
from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.launch import LaunchPlan, Variant
from edge.plugins.compiler import aot

_NAME = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)


def _disassembler() -> Path:
    triton = pytest.importorskip("triton", reason="compiles kernels: make test installs it")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not tool.exists():
        pytest.skip("this Triton brings no nvdisasm")
    return tool


@cache
def plan() -> LaunchPlan:
    """Return a plan of two layers of Mamba-130M's widths in `w8a8`."""
    whole = MODELS["mamba-130m"]
    with TemporaryDirectory() as folder:
        short = whole.model_copy(update={"layers": whole.layers[:2]})
        with open_bundle(write_bundle(short, "w8a8", Path(folder) / "b", chunk=64)) as bundle:
            return open_plan(bundle)


# the kernel, and the maximum number of rows of the run that launches it; None for any
PRODUCTS = [("linear_int8.few", 1), ("linear_conv.few", 1), ("linear_int8.many", None)]
ARCHITECTURES = [87, 90, 120]


@cache
def variant(kernel: str, rows: int | None) -> Variant:
    """Return the largest `kernel` that a run of this many rows launches."""
    program = next(p for p in plan().programs if p.kind == "chain" and p.max_rows == rows)
    found = [plan().variants[plan().launches[index].variant] for index in program.launches]
    return max((v for v in found if v.kernel == kernel), key=_size)


@cache
def compiled() -> dict[int, aot.Kernels]:
    """Compile all at once: starting a compiler takes as long as a kernel."""
    return aot.compile_variants([variant(*product) for product in PRODUCTS], ARCHITECTURES)


@cache
def instructions(kernel: str, sm: int, rows: int | None) -> list[str]:
    about, cubin = compiled()[sm].get(variant(kernel, rows))
    assert about.local_bytes == 0, "it does not fit in the registers"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "a.cubin"
        file.write_bytes(cubin)
        said = subprocess.run(
            [_disassembler(), "-c", str(file)], capture_output=True, text=True, check=True
        ).stdout
    return _NAME.findall(said)


def _size(variant: Variant) -> int:
    return int(variant.constants["N"] or 0) * int(variant.constants["K"] or 0)


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize(("kernel", "rows"), PRODUCTS)
def test_int8_products_are_tensor_cores_fed_by_16_bytes_at_once(
    kernel: str, rows: int | None, sm: int
) -> None:
    found = instructions(kernel, sm, rows)
    assert any(name.startswith(("IMMA", "IGMMA")) for name in found)
    # a product with a single step reads directly into registers
    loads = [name for name in found if name.startswith(("LDGSTS", "LDG."))]
    assert sum(name.endswith(".128") for name in loads) >= 16
    assert not any(name.endswith((".U8", ".S8", ".U16", ".S16")) for name in loads)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_the_convolution_reads_what_was_made_behind_a_barrier(sm: int) -> None:
    """Other threads of the program stored it; without a barrier some values are not there yet."""
    found = instructions("linear_conv.few", sm, 1)
    stored = next(i for i, name in enumerate(found) if name.startswith("STG"))
    behind = [name for name in found[stored:] if name.startswith(("BAR", "LDG."))]
    assert behind[0].startswith("BAR.SYNC") and any(name.startswith("LDG.") for name in behind)
