"""The oldest supported Triton compiles the kernels that the newest does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.launch import LaunchPlan
from edge.plugins import catalogue
from edge.runtime.model import resolve
from tests.lowered_models import lowered

OLDEST = Path(sys.prefix) / "oldest-triton"  # `make test` installs Triton 3.6.0 there

PROGRAM = """
import sys
from pathlib import Path
from edge.plugins.compiler import aot, pool
from tests.gpu.variants import read
every, made = read(Path(sys.argv[1])), []
jobs = [(one, sm) for one in every for sm in (87, 90) if sm == 87 or one.kernel in sys.argv[2:]]
pool.compile_each(jobs, lambda one, sm, compiled: made.append(sm))
print(aot.triton_version(), made.count(87), made.count(90))
"""


def _plans() -> list[LaunchPlan]:
    """Return plans of embedded bundles, and of Mamba-1 and 4-bit weights, which no bundle has."""
    found = [lowered("mamba1", "w8a8"), lowered("mamba2", "w4a8"), lowered("mamba1", "w4")]
    for name in ("demo", "demo-fp16"):
        with open_bundle(resolve(name)) as bundle:
            found.append(open_plan(bundle))
    return found


@pytest.mark.skipif(not OLDEST.is_dir(), reason="Triton 3.6.0 is not there: run `make test`")
def test_it_compiles_a_variant_of_every_kernel(tmp_path: Path) -> None:
    """All for sm_87; for sm_90, whose products are compiled differently, those with products."""
    variants = {variant.kernel: variant for plan in _plans() for variant in plan.variants}
    products = {
        name: variant
        for name, variant in variants.items()
        if "tl.dot(" in catalogue.kernel_file(name.partition(".")[0]).read_text()
    }
    assert len(variants) > 15 and len(products) >= 5
    folder = tmp_path / "variants"
    folder.mkdir()
    for variant in variants.values():
        (folder / f"{variant.key}.json").write_text(variant.model_dump_json())
    environment = {
        "PYTHONPATH": os.pathsep.join((str(OLDEST), str(Path(__file__).parents[1]))),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *products],
        env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == ["3.6.0", str(len(variants)), str(len(products))], done.stderr
