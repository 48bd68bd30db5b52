"""The `cpu` engine: the golden sentence, threads, older processors, and what it refuses.

`tests/kernels` and `tests/cuda/test_engine_models.py` compare its kernels and whole models with the
references, for every instruction set of this machine.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest

import edge
from edge.apps import cli
from edge.apps.options import RunOptions
from edge.errors import EngineError, InputError
from edge.launch import Variant
from edge.plugins.cpu import library
from edge.runtime.cpu.device import HostMemory, Pool
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.model import EMBEDDED, resolve
from tests import golden, on_device, quantized_models
from tests.cuda.models import tiny_engine
from tests.facts import facts
from tests.malformed import resigned
from tests.programs import called

ROOT = Path(__file__).parent.parent
compiled = pytest.mark.skipif(
    library.path() is None,
    reason="needs the kernels for CPUs (run make test where there is a C++ compiler)",
)
ADD = Variant(
    kernel="rows.add", arguments=("a", "b", "y"), types=("*fp32",) * 3,
    constants={"WIDTH": 4, "A_STRIDE": 4, "B_STRIDE": 4, "BLOCK": 4},
)  # fmt: skip


@compiled
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library.library.cache_clear()
    try:
        with monkeypatch.context() as other:
            other.setattr(library, "VERSION", library.VERSION + 1)
            with pytest.raises(EngineError, match=r"different version.*make chat"):
                library.library()
    finally:
        library.library.cache_clear()


def test_a_library_of_one_python_is_from_an_older_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installs compile `_native.abi3.so` since, and leave such a file in a checkout."""
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    monkeypatch.delenv(library.LIBRARY_VARIABLE, raising=False)
    find = library.path.__wrapped__
    assert find() is None
    older = tmp_path / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    older.touch()
    assert find() == older
    (tmp_path / "_native.abi3.so").touch()
    assert find() == tmp_path / "_native.abi3.so"


@compiled
@pytest.mark.parametrize("name", EMBEDDED)
def test_golden_sentence(name: str) -> None:
    with edge.load(name, engine="cpu", threads=1) as model:
        golden.check(name, model)


def prompt_steps_and_rewind(engine: CudaEngine, vocab: int) -> np.ndarray:
    """Return the logits of all of them."""
    ids = np.random.default_rng(0).integers(0, vocab, (1, 45))
    state = engine.new_state(window=4)
    rows = [engine.run(ids, state, rows="all", commit=True).copy()]
    rows += [engine.run(ids[:, i : i + 1], state).copy() for i in range(8)]
    rows.append(engine.run(ids[:, 8:12], state, rows="all").copy())
    state.rewind(2)
    rows.append(engine.run(ids[:, 12:13], state).copy())
    return np.concatenate(rows, axis=1)


@compiled
@pytest.mark.parametrize("name", ["demo", "demo-bytes"])
def test_threads_change_no_bit(name: str) -> None:
    """Two models share the machine with their threads."""
    found = [
        prompt_steps_and_rewind(edge.load(name, engine="cpu", threads=threads).engine, 256)
        for threads in (1, 2, 5)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@compiled
@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("mamba1", "w4"), ("mamba1", "w8a8"), ("all", "w8"), ("all", "w4a8"), ("deltanet", "w8"),
        ("head gate", "w4a8"), ("experts", "w4"),  # the second has LFM3's layers
    ],
)  # fmt: skip
def test_pieces_change_no_bit(name: str, quant: str) -> None:
    """For any number of threads taking the smallest pieces."""
    found = []
    for threads in (1, 2, 5):
        with on_device.running(library.instruction_sets()[-1], threads):
            found.append(prompt_steps_and_rewind(tiny_engine(name, quant), quantized_models.V))
    assert np.isfinite(found[0]).all()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@compiled
@pytest.mark.parametrize(
    ("name", "quant"),
    [("mamba1", "w4"), ("all", "w8"), ("all", "w8a8"), ("experts", "w4")],
)
def test_a_run_gives_the_bits_of_steps(name: str, quant: str) -> None:
    """So greedy drafting gives what plain decoding gives, token for token."""
    ids = np.random.default_rng(0).integers(0, quantized_models.V, (1, 24))
    with on_device.running(library.instruction_sets()[-1]):
        engine = tiny_engine(name, quant)
    state = engine.new_state(window=16)
    engine.run(ids[:, :12], state, commit=True)
    steps = np.concatenate([engine.run(ids[:, i : i + 1], state).copy() for i in range(12, 24)], 1)
    for count in (4, 12):
        state.clear()
        engine.run(ids[:, :12], state, commit=True)
        run = engine.run(ids[:, 12 : 12 + count], state, rows="all")
        np.testing.assert_array_equal(run, steps[:, :count])


@compiled
def test_trees_of_any_size() -> None:
    """Also with more nodes than the GPU kernels for trees take."""
    rng = np.random.default_rng(0)
    ids, prompt = rng.integers(5, 250, (1, 49)), rng.integers(5, 250, (1, 9))
    parents = [-1, *(int(rng.integers(max(-1, node - 6), node)) for node in range(1, 49))]
    found = []
    for name in ("cpu", "ort"):
        engine = edge.load("demo-draft", engine=name, threads=1).engine
        state = engine.new_state(window=49, capacity=64)
        engine.run(prompt, state, commit=True)
        rows = [engine.run(ids, state, parents=parents, rows="all").copy()]
        state.select(48)
        found.append(np.concatenate([*rows, engine.run(prompt[:, :1], state)], axis=1))
    np.testing.assert_allclose(found[0], found[1], atol=2e-3 * np.abs(found[1]).max())


@compiled
def test_engines_on_threads_of_their_own() -> None:
    """Four callers at once, each with an engine of two threads; each gets its usual result."""
    failures: list[BaseException] = []

    def say() -> None:
        try:
            with edge.load("demo-draft", engine="cpu", threads=2) as model:
                for _ in range(3):
                    golden.check("demo-draft", model)
        except BaseException as problem:
            failures.append(problem)

    callers = [threading.Thread(target=say) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not failures and not any(caller.is_alive() for caller in callers)


@compiled
def test_a_forked_child_ends() -> None:
    """It has none of the threads: it gets an error, and does not wait for them on exit."""
    program = (
        "import os, edge\nfrom edge.errors import EngineError\n"
        "model = edge.load('demo-draft', engine='cpu', threads=3)\n"
        "state = model.engine.new_state()\nmodel.engine.run([[1]], state)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n        model.engine.run([[1]], state)\n"
        "    except EngineError:\n        del model, state\n        raise SystemExit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60)
    assert child.returncode == 0


@compiled
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have other sets")
def test_older_processors() -> None:
    """Instruction sets that a processor lacks are neither offered nor run: Nehalem has SSE4 and no
    AVX.
    """
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64 is needed: apt-get install -y qemu-user")
    program = (
        "import edge\nfrom edge.plugins.cpu import library\nfrom tests import golden\n"
        "assert library.instruction_sets() == ('plain',), library.instruction_sets()\n"
        "golden.check('demo-draft', edge.load('demo-draft', engine='cpu', threads=2))\n"
    )
    # numpy's products would use the kernels of the processor that OPENBLAS_CORETYPE names
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    child = subprocess.run(
        [emulator, "-cpu", "Nehalem", sys.executable, "-c", program],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**environment, "PYTHONPATH": str(ROOT), "EDGE_MEMORY_CHECK": "off"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr


@compiled
def test_sets_and_kernels_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SET_VARIABLE, "avx1024")
    with pytest.raises(EngineError, match="avx1024") as caught:
        library.instruction_set()
    assert caught.value.field == library.SET_VARIABLE and "plain" in str(caught.value.remedy)
    with pytest.raises(EngineError, match=r"rows\.subtract"):
        wrong = ADD.model_copy(update={"kernel": "rows.subtract"})
        library.CpuKernel(library.text_of(wrong), "plain")
    with pytest.raises(EngineError, match=r"rows\.add.*WIDTH"):
        constants = {"A_STRIDE": 4, "B_STRIDE": 4, "BLOCK": 4}
        library.CpuKernel(library.text_of(ADD.model_copy(update={"constants": constants})), "plain")
    for change, said in (
        ({"constants": {**ADD.constants, "WIDTH": "4\nargument y *fp32"}}, "one word"),
        ({"arguments": ("a", "b"), "types": ADD.types[:2],
          "constants": {**ADD.constants, "y": None}}, r"rows\.add: y is None"),
        ({"types": ("*fp32", "*fp32", "*bf16")}, r"rows\.add: y has the unknown type"),
    ):  # fmt: skip
        with pytest.raises(EngineError, match=said):
            library.CpuKernel(library.text_of(ADD.model_copy(update=change)), "plain")
    picked = Variant(
        kernel="pick.blocks", arguments=("logits", "keys"), types=("*fp32", "*i64"),
        constants={"V": 8, "STRIDE": 8, "COUNT": 1, "BLOCK": 0},
    )  # fmt: skip
    with pytest.raises(EngineError, match=r"pick\.blocks: BLOCK must be 1 to"):
        library.CpuKernel(library.text_of(picked), "plain")
    table = Variant(
        kernel="embed.embed", arguments=("tokens", "table", "y"), types=("*i32", "*i64", "*fp32"),
        constants={"scale": None, "D": 8, "SCALE_STEP": 0},
    )  # fmt: skip
    with pytest.raises(EngineError, match=r"embed\.embed: table has a type"):
        library.CpuKernel(library.text_of(table), "plain")
    with pytest.raises(InputError, match="threads"):
        edge.load("demo-draft", engine="cpu", threads=0)


@compiled
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_are_pinned() -> None:
    """All but the caller, each to a CPU of its own, and only if that is asked for."""
    cpus = sorted(os.sched_getaffinity(0))
    for pin, expected in ((False, set(cpus)), (True, {cpus[1]})):
        before = set(os.listdir("/proc/self/task"))
        with edge.load("demo-draft", engine="cpu", threads=2, pin=pin) as model:
            (started,) = set(os.listdir("/proc/self/task")) - before
            assert os.sched_getaffinity(int(started)) == expected
            assert os.sched_getaffinity(0) == set(cpus)
            golden.check("demo-draft", model)
        del model


@compiled
def test_threads_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    many = len(os.sched_getaffinity(0)) + 1
    with pytest.raises(InputError, match=facts("pin: ", f"{many} threads", many - 1)):
        RunOptions(threads=many, pin=True).load("demo-draft")
    with pytest.raises(EngineError, match=facts("pin: ", "engine ort", "not pin")):
        RunOptions(engine="ort", pin=True).load("demo-draft")
    with pytest.raises(EngineError, match=facts("pin: ", "engine ort", "not pin")):
        edge.load("demo-draft", provider="cpu", pin=True)
    monkeypatch.setattr(library.library(), "edge_cpu_pinnable", lambda: 0)
    with pytest.raises(EngineError, match=facts("pin: ", "cannot be pinned", "this system")):
        edge.load("demo-draft", threads=1, pin=True)


@compiled
def test_profile() -> None:
    """Its figures and its roofline are those of a CPU, also without a GPU."""
    code, out, err = called(
        cli.main, "profile", "demo-draft", "--engine", "cpu", "-p", 8, "-n", 4, "-r", 1, "--json",
        "--threads", 1, "--pin",
    )  # fmt: skip
    assert code == 0, err
    facts = json.loads(out)
    assert facts["ttft_ms"] > 0 and facts["tpot_ms"] > 0 and facts["pin"]
    assert {"decode", "prefill"} == facts["breakdown"].keys()
    assert "roofline" not in facts["absent"]


@compiled
def test_what_a_plan_computes_is_counted_before_it_is_loaded(tmp_path: Path) -> None:
    """A hostile plan: hashes match, and every check of the plan passes."""
    folder = Path(shutil.copytree(resolve("demo-draft"), tmp_path / "bundle"))
    plan = json.loads((folder / "graphs/cuda.json").read_text())
    plan["values"]["layers.0.scan"]["elements"]["times"] = 1 << 36
    (folder / "graphs/cuda.json").write_text(json.dumps(plan))
    resigned(folder)
    with pytest.raises(EngineError, match=r"needs \d+ MiB of memory"):
        edge.load(folder, engine="cpu", threads=1)


def test_no_memory_for_a_piece() -> None:
    """A thread without memory reports it to the caller, and the pool continues."""
    norm = Variant(
        kernel="norm.norm", arguments=("x", "weight", "y"), types=("*fp32",) * 3,
        constants={
            **dict.fromkeys(("added", "bias", "rows", "total", "B", "scale")), "WIDTH": 1 << 48,
            "X_STRIDE": 1, "ADDED_STRIDE": 1, "CENTERED": 0, "EPS": 1e-5,
        },
    )  # fmt: skip
    made = [library.CpuKernel(library.text_of(each), "plain") for each in (norm, ADD)]
    rows = np.ones((3, 64, 4), np.float32)
    values = (library.CallValue * 3)(*(library.CallValue(address=x.ctypes.data) for x in rows))
    no_memory, add = ((library.CpuCall * 1)((each.handle, values, (64, 1, 1))) for each in made)
    pool = Pool(3, finest=True)
    for _ in range(3):
        with pytest.raises(EngineError, match="no memory"):
            pool.run(no_memory)
        rows[2] = 0
        pool.run(add)
        assert (rows[2] == 2).all()


@compiled
def test_more_threads_than_the_system_gives() -> None:
    """The caller gets an error, and the threads already started end."""
    program = (
        "import resource\nfrom edge.errors import EngineError\n"
        "from edge.runtime.cpu.device import Pool\nPool(2)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "try:\n    Pool(2000)\nexcept EngineError as problem:\n    print(problem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "2000 threads" in done.stdout, done.stderr


def test_every_launched_kernel_is_written_for_cpus() -> None:
    plugins = ROOT / "plugins"
    launched = {
        name
        for file in plugins.glob("*/lowering.py")
        for name in re.findall(r'"([a-z][a-z0-9_]*\.[a-z][a-z0-9_]*)"', file.read_text("utf-8"))
        if (file.parent / f"triton_{name.partition('.')[0]}.py").exists()
    }
    written = {
        name
        for file in plugins.glob("*/cpu*.h")
        for name in re.findall(r'^KERNEL\("(.*)", ', file.read_text("utf-8"), re.M)
    }
    assert len(launched) > 20 and launched <= written


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library.library.cache_clear()
    monkeypatch.setattr(library, "path", lambda: None)
    try:
        with pytest.raises(EngineError, match="not compiled") as caught:
            edge.load("demo-draft", engine="cpu")
    finally:
        library.library.cache_clear()
    assert "compiler" in str(caught.value.remedy)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are the system's")
def test_memory_of_small_pages_is_taken_where_it_is_touched() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    memory = HostMemory(64 << 20)
    memory.take_small_pages()
    before = resident()
    memory.data[:: 1 << 20] = 1
    assert resident() - before < 4 << 20 and int(memory.data.sum()) == 64
