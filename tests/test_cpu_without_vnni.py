"""int8 products on a CPU that adds in 16 bits, compared with this one; if it is none, emulated.

Without VNNI (Intel before 2019, AMD before Zen 4) the u8·s8 instruction saturates at 32767, which
two products of 255 · 127 exceed. The runtime then has ONNX Runtime use a slower, exact one.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge import cpu
from edge.config import Mamba1Config, ModelConfig
from edge.export.graph import BuiltGraph, build_graph
from edge.export.quantize.plan import INT8_ROWS, Product, Rounding, Storage
from edge.export.recipes import plan_model, recipe
from tests.int8_models import HYBRID, build_int8, random_tensors

ROOT = Path(__file__).parent.parent
QEMU = "qemu-x86_64"
CPU = "Haswell"  # AVX2, no VNNI; AVX-512 is not emulated

CHILD = """
import json
import sys
from pathlib import Path
import numpy as np
from edge import cpu
from edge.config import ModelConfig
from edge.runtime.ort import OrtEngine

ids = np.random.default_rng(0).integers(0, 40, (1, 16))

def logits(folder):
    config = ModelConfig.model_validate_json((folder / "config.json").read_text())
    dtypes = json.loads((folder / "dtypes.json").read_text())
    engine = OrtEngine(folder / "graphs/ort.onnx", config, threads=1, state_dtypes=dtypes)
    state = engine.new_state(capacity=16)
    prompt = engine.run(ids[:, :9], state, rows="all", commit=True).copy()
    run = engine.run(ids[:, 9:13], state, rows="all").copy()
    steps = [engine.run(ids[:, i : i + 1], state).copy() for i in range(13, 16)]
    return np.concatenate([prompt, run, *steps], axis=1)[0]

models = sorted(p for p in Path(sys.argv[1]).iterdir() if p.is_dir())
found = {model.name: logits(model) for model in models}
found["has_vnni"] = np.array(cpu.has_vnni())
cpu.has_vnni = lambda: True  # as if nobody had looked
found |= {f"{model.name} unguarded": logits(model) for model in models}
np.savez(sys.argv[2], **found)
"""

Found = dict[str, NDArray[np.float32]]


def emulator() -> str:
    """Return the emulator, or skip with instructions to get it."""
    if platform.machine() != "x86_64":
        pytest.skip("other processors have no such instruction")
    found = shutil.which(QEMU)
    if found is None:
        pytest.skip(f"{QEMU} is needed: apt-get install -y qemu-user")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"version (\d+)\.(\d+)", said)
    if version is None or tuple(map(int, version.groups())) < (7, 2):
        pytest.skip("AVX2 is emulated by qemu 7.2 and later")
    return found


# A head with known sums: the norm of an embedding row of ±1 is that row, rounded to ±127.
SIGNS = np.where(np.random.default_rng(1).random((40, 64)) < 0.7, 1, -1).astype(np.float32)
ROWS = np.random.default_rng(2).integers(90, 128, (40, 64)).astype(np.float32)
ROWS[:, ::16] = 127  # so that the scale of a row, or of a block, is one
HEAD = ModelConfig(
    family="test", vocab_size=40, d_model=64, tie_embeddings=False,
    layers=(Mamba1Config(d_inner=32, d_state=4, dt_rank=2),),
)  # fmt: skip
HEADS = {
    "head-int8": Product(INT8_ROWS, Rounding(np.full(1, 1 / 127, np.float32))),
    "head-w8": Product(Storage(8, 32)),
    "head-w4": Product(Storage(4, 32)),
}


def build_head(folder: Path, head: Product) -> BuiltGraph:
    """Build a model that adds nothing to its embedding before the head."""
    tensors = random_tensors(HEAD)
    tensors["layers.0.out_proj.weight"][:] = 0
    tensors |= {"embedding.weight": SIGNS, "lm_head.weight": ROWS / 127}
    tensors["norm_f.weight"] = np.ones(64, np.float32)
    return build_graph(HEAD, tensors, folder, replace(plan_model(HEAD, recipe("fp32")), head=head))


def expected_logits() -> NDArray[np.float32]:
    """Return the head's logits in exact arithmetic."""
    ids = np.random.default_rng(0).integers(0, 40, 16)
    return np.asarray(SIGNS[ids].astype(int) @ ROWS.astype(int).T / 127, np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    makers: dict[str, Callable[[Path], BuiltGraph]] = {
        "int8": lambda path: build_int8(path, ("fp32", "fp32")),
        "w8": lambda path: build_graph(HYBRID, random_tensors(HYBRID), path, "w8"),
        "w4": lambda path: build_graph(HYBRID, random_tensors(HYBRID), path, "w4"),
    }
    makers |= {n: lambda path, head=head: build_head(path, head) for n, head in HEADS.items()}  # type: ignore[misc]
    for name, make in makers.items():
        (folder / name).mkdir()
        built = make(folder / name)
        (folder / name / "dtypes.json").write_text(json.dumps(built.state_dtypes))
        config = HEAD if name in HEADS else HYBRID
        (folder / name / "config.json").write_text(config.model_dump_json())
    return folder


def run(models: Path, out: Path, *emulated: str) -> Found:
    child = subprocess.run(
        [*emulated, sys.executable, "-c", CHILD, str(models), str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    with np.load(out) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def here(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    if cpu.has_vnni():
        emulator()
    return run(models, tmp_path_factory.mktemp("here") / "logits.npz")


@pytest.fixture(scope="module")
def there(models: Path, here: Found, tmp_path_factory: pytest.TempPathFactory) -> Found:
    if not cpu.has_vnni():
        return here
    folder = tmp_path_factory.mktemp("there")
    # the emulator shows its programs the host's /proc/cpuinfo, unless there is another
    (folder / "proc").mkdir()
    flags = re.sub(r"\S*vnni\S*", "", Path("/proc/cpuinfo").read_text())
    (folder / "proc/cpuinfo").write_text(flags)
    qemu = (emulator(), "-L", str(folder), "-cpu", CPU)
    return run(models, folder / "logits.npz", *qemu)


def apart(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the largest difference, relative to the largest logit."""
    assert one.shape == other.shape
    return float(np.abs(one - other).max() / np.abs(other).max())


@pytest.mark.parametrize(("name", "tolerance"), [("int8", 1e-6), ("w8", 0.01), ("w4", 0.1)])
def test_sums_that_saturate_16_bits_are_right(
    name: str, tolerance: float, here: Found, there: Found
) -> None:
    """Block weights are rounded; the known sums are of the weights before that."""
    for found in (here, there):
        assert apart(found[f"head-{name}"], expected_logits()) <= tolerance
    assert apart(there[f"head-{name}"], here[f"head-{name}"]) <= 1e-6


@pytest.mark.parametrize("name", ["int8", "w8", "w4"])
def test_models_give_what_they_give_here(name: str, here: Found, there: Found) -> None:
    """By prefill, a short run and steps. One activation may round the other way."""
    if there is here:
        pytest.skip("this CPU has no VNNI: there is nothing to compare")
    assert apart(there[name], here[name]) <= (0.02 if name == "int8" else 1e-5)
    assert np.array_equal(there[name].argmax(-1), here[name].argmax(-1))


def test_unguarded_int8_would_be_wrong(here: Found, there: Found) -> None:
    """Otherwise the tests above would show nothing; and the runtime detects by itself that it must
    guard.
    """
    assert not there["has_vnni"]
    assert apart(there["head-int8 unguarded"], here["head-int8"]) > 0.5
    assert apart(there["int8 unguarded"], here["int8"]) > 0.1


@pytest.mark.parametrize("name", ["head-w8", "head-w4", "w8", "w4"])
def test_weights_of_blocks_need_no_guard(name: str, there: Found) -> None:
    assert np.array_equal(there[f"{name} unguarded"], there[name])
