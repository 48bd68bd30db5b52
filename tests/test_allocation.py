"""No state is allocated per token: counted below the process, not reported by it.

ONNX Runtime makes 500 to 1100 small allocations per run of these graphs: a few for each node, and
one table of all values (24 bytes each). All are freed within the run. Nothing as large as a state
tensor may ever be allocated, nor any address space. The engine `cpu` allocates nothing of 4 kB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edge.config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    Mamba1Config,
    Mamba2Config,
    ModelConfig,
)
from edge.export.graph import build_graph
from edge.export.network import Network
from edge.mixers.base import MixerConfig
from edge.plugins.cpu import library
from tests.compiling import compiled
from tests.libedge_bundles import write
from tests.rounded_states import round_states

ROOT = Path(__file__).parent.parent

# glibc's own entry points are called underneath, so no symbol has to be looked up while counting
SHIM = r"""
#define _GNU_SOURCE
#include <stddef.h>
#include <errno.h>
#include <stdint.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

/* small, large, largest, bytes, mapped */
_Atomic size_t edge_counts[5];

static void count(size_t size) {
    if (size < 4096) { edge_counts[0]++; } else { edge_counts[1]++; }
    size_t seen = edge_counts[2];
    while (size > seen && !atomic_compare_exchange_weak(&edge_counts[2], &seen, size)) {}
    edge_counts[3] += size;
}
void *malloc(size_t n) { count(n); return __libc_malloc(n); }
void *calloc(size_t n, size_t m) { count(n * m); return __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { count(n); return __libc_realloc(p, n); }
void *memalign(size_t a, size_t n) { count(n); return __libc_memalign(a, n); }
void *aligned_alloc(size_t a, size_t n) { count(n); return __libc_memalign(a, n); }
int posix_memalign(void **p, size_t a, size_t n) {
    count(n);
    *p = __libc_memalign(a, n);
    return *p ? 0 : ENOMEM;
}
void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    edge_counts[4]++;
    return (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset);
}
void *mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    return mmap(at, n, prot, flags, fd, offset);
}
"""

OPEN = """
import json, sys
from pathlib import Path
import numpy as np
import edge
from edge.config import ModelConfig
from edge.runtime.ort import OrtEngine

def opened(folder, **sizes):
    if (folder / "manifest.json").exists():
        return edge.load(folder, engine="cpu", threads=sizes["threads"]).engine
    config = ModelConfig.model_validate_json((folder / "config.json").read_text())
    dtypes = json.loads((folder / "state_dtypes.json").read_text())
    return OrtEngine(folder / "graphs/ort.onnx", config, state_dtypes=dtypes, **sizes)
"""

CHILD = """
import ctypes, gc

runs, warm = int(sys.argv[2]), 200
engine = opened(Path(sys.argv[1]), threads=2)
counts = (ctypes.c_size_t * 5).in_dll(ctypes.CDLL(None), "edge_counts")

def address_space():
    return int(Path("/proc/self/statm").read_text().split()[0])

def steps(number):
    for _ in range(number):
        engine.run(ids, state)
        if count > 1:
            state.rewind(count - 1)

for count in map(int, sys.argv[3:]):
    state = engine.new_state(capacity=2048)
    ids = np.arange(count)[None] % engine.config.vocab_size
    steps(warm)
    gc.collect()
    gc.disable()
    pages = address_space()
    counts[:] = [0] * 5
    steps(runs)
    seen = list(counts)
    print(json.dumps({
        "small": seen[0], "large": seen[1], "largest": seen[2], "bytes": seen[3],
        "mapped": seen[4], "pages": address_space() - pages,
        "tensor": min(state.layout.bytes_of(*item) for item in state.layout.recurrent.items()),
    }))
    gc.enable()
"""

SOAK = """
from edge.runtime import memory

engine = opened(Path(sys.argv[1]), threads=1, chunk=32)
state = engine.new_state(capacity=256)
rng = np.random.default_rng(0)

def requests(number):
    for _ in range(number):
        if rng.random() < 0.2 or state.position > 150:
            state.clear()
        count = int(rng.integers(1, 33))
        engine.run(rng.integers(0, 256, (1, count)), state, commit=True)
        count = int(rng.integers(1, 9))
        parents = [int(rng.integers(-1, node)) for node in range(count)]
        engine.run(rng.integers(0, 256, (1, count)), state, parents=parents, rows="all")
        state.select(int(rng.integers(-1, count)))
        for _ in range(4):
            count = int(rng.integers(1, 9))
            engine.run(rng.integers(0, 256, (1, count)), state, rows=[count - 1, 0][:count])
            state.rewind(int(rng.integers(0, state.reach + 1)))
        snapshot = state.snapshot()
        state.fork()
        state.restore(snapshot)

requests(250)
before = memory.private_bytes()
requests(150)
print(memory.private_bytes() - before)
"""

MODELS: dict[str, tuple[MixerConfig, ...]] = {
    "hybrid": (
        Mamba2Config(d_inner=512, d_ssm=512, d_state=32, head_dim=64),
        AttentionConfig(n_heads=8, n_kv_heads=2, head_dim=32),
        Mamba1Config(d_inner=512, d_state=16, dt_rank=16),
    ),
}
CPU = "every state"
MODELS["rounded"] = MODELS["hybrid"]
MODELS[CPU] = (
    *MODELS["hybrid"],
    GatedDeltaNetConfig(n_heads=8, head_dim=32, n_groups=4, d_state=32),
    AttentionConfig(n_heads=8, n_kv_heads=2, head_dim=32, window=32),
)
# types of states that are not fp32; convolution states stay fp32, being too small otherwise to tell
# from the table of values
DTYPES = {"rounded": {"layers.0.ssm_state": "float16", "layers.2.ssm_state": "int8"}}


@pytest.fixture(scope="module")
def shim() -> Path:
    return compiled("count.so", "gcc", "-O2", "-fPIC", "-shared", "-x", "c", "-", source=SHIM)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a graph for `ort`, or a bundle for `cpu`."""
    config = ModelConfig(family="test", vocab_size=256, d_model=64, layers=MODELS[request.param])
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    if request.param == CPU:
        if library.path() is None:
            pytest.skip("needs the kernels for CPUs")
        return write(folder / "bundle", Network(config).eval(), chunk=32)
    tensors = {k: v.detach().numpy() for k, v in Network(config).canonical_tensors().items()}
    graph, dtypes = build_graph(config, tensors, folder).graph, DTYPES.get(request.param, {})
    graph.write_bytes(round_states(graph.read_bytes(), dtypes))
    (folder / "state_dtypes.json").write_text(json.dumps(dtypes))
    (folder / "config.json").write_text(config.model_dump_json())
    return folder


def test_no_memory_is_taken_per_run(
    model: Path, shim: Path, record_property: pytest.RecordProperty
) -> None:
    runs, counts, faults = 200, (1, 4), ["untried"]
    # the arena's list of its pieces doubles when their number reaches a new maximum
    tables = 0 if (model / "manifest.json").exists() else runs + 1
    # beside other work, heap and threads reserve memory now and then; what runs take, they take in
    # every process
    for _ in range(4):
        child = subprocess.run(
            [sys.executable, "-c", OPEN + CHILD, str(model), *map(str, (runs, *counts))],
            cwd=ROOT, capture_output=True, text=True, timeout=100,
            # Python's own pools take megabytes now and then; without them everything is counted.
            # Threads that meet in glibc's malloc would reserve 64 MB each
            env={"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1",
                 "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        assert child.returncode == 0, child.stderr
        every = dict(zip(counts, map(json.loads, child.stdout.splitlines()), strict=True))
        faults = [
            f"{count} tokens: {fault}"
            for count, seen in every.items()
            for fault, found in {
                "the address space grew": seen["pages"] or seen["mapped"],
                "more than the table of values": seen["large"] > tables,
                "an allocation as large as a state tensor": seen["largest"] >= seen["tensor"],
            }.items()
            if found
        ]
        if not faults:
            break
    for count, seen in every.items():
        record_property(f"small_allocations_per_run_of_{count}", seen["small"] / runs)
    assert not faults, every


@pytest.mark.parametrize("model", ["rounded", CPU], indirect=True)
def test_memory_stays_flat_over_varied_runs(model: Path) -> None:
    """Chunks, trees, verify runs, snapshots and forks of every length, after a warm-up."""
    child = subprocess.run(
        [sys.executable, "-c", OPEN + SOAK, str(model)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) <= 1 << 19
