"""How much memory a model will take, asked before it is loaded and answered again after."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
from collections.abc import Mapping
from pathlib import Path

from edge.bundle import Manifest
from edge.config import ModelConfig
from edge.errors import EdgeError, EngineError, StateError
from edge.runtime.layout import StateLayout
from edge.runtime.ring import ring_bases, ring_slots
from edge.tensors import parameters, tensor_shapes

CHECK_VARIABLE = "EDGE_MEMORY_CHECK"
_MEMINFO = "/proc/meminfo"
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FLOAT = 4

# Measured as growth of anonymous and file-backed resident memory, ONNX Runtime 1.31.1 and 1.23.2,
# x86-64: 24 Mamba layers of 768 (129 M parameters) in fp32, fp16, w8, w4, w8a8; demonstrations.
# The sum was 1.04 to 1.26 times what was measured; 1.25 for a hybrid with 4096 tokens of context.
# `edge profile BUNDLE --json` gives a bundle's own figures, under `memory`.
# A process that has imported the runtime and loaded nothing holds 68 MB.
PROGRAM = 68_000_000
# ONNX Runtime's own code that loading and the first runs bring in: 8 MB, then 4 to 8.
_LIBRARY = 14_000_000
# The least that any engine takes beside weights and states.
LEAST = 12_000_000
# Nodes of a session, beyond its weights: 21 to 24 MB for 24 Mamba layers.
_MAMBA_NODES, _OTHER_NODES = 900_000, 300_000
# Rounded weights, unpacked scales included, in files' sizes: 1.02 (w8), 1.08 (w8a8), 1.17 (w4).
_ROUNDED = 1.1
# What loading holds for a moment. fp16 is made fp32 before it is packed: 2.0 to 2.2 times the fp32
# size; fp32: 1.45; rounded: 1.3 to 1.7 times the files.
_LOADING = {32: 1.5, 16: 2.1}
_LOADING_ROUNDED = 1.7
# Of a limited address space also what is mapped and never touched: libraries, stacks of threads.
# Where it is short of that, native code aborts: measured up to 30 MB with two threads.
_MAPPED, _STACK = 32_000_000, 8_000_000
# Heap, bindings and the least an arena takes.
_RUN = 4_000_000
# Of one layer's keys and of its values: what is valid in fp16, in fp32, and with the new tokens.
_WIDENED = 2 * (1 + 2 + 2)
# What a run of ONNX Runtime may take: room for several at a time, wide batches, and weights turned.
_SPARE, _SPARE_RUNS = 1 << 28, 16


def plan(
    config: ModelConfig,
    layout: StateLayout,
    *,
    window: int,
    chunk: int,
    weights: int,
    widens: bool = True,
) -> dict[str, int]:
    """Bytes by purpose.

    Keys: `weights` (resident, packed copies included), `state_ring` (every slot, base and log),
    `kv_cache`,
    `logits` (of a run of `window` tokens), `workspace` (estimated, of a run of `chunk` tokens),
    `total` of these, and, not in the total, `state` (one recurrent state) and `snapshot` (one,
    with full KV caches and no token pending). `widens`: fp16 caches are attended to as fp32 copies,
    as ONNX Runtime does.
    """
    state, cache = layout.slot_bytes, layout.cache_bytes
    # several sequences are read token by token where there is attention
    tokens = 1 if layout.batch > 1 and config.has_attention else chunk
    out = {
        "weights": weights,
        "state_ring": ring_bytes(layout, window),
        "kv_cache": cache,
        "logits": _FLOAT * (window + 1) * layout.batch * config.vocab_size,
        "workspace": workspace_bytes(config, tokens, layout.batch, layout.capacity),
    }
    if widens:
        out["workspace"] += _WIDENED * _half_cache(layout)
    out["total"] = sum(out.values())
    out["state"] = state
    out["snapshot"] = state + cache
    return out


def _half_cache(layout: StateLayout) -> int:
    """Bytes of the largest KV cache in fp16."""
    halves = (n for n in layout.caches if layout.dtype(n).itemsize == 2)
    return max((layout.bytes_of(name, layout.caches[name]) for name in halves), default=0)


def plan_bundle(
    manifest: Manifest,
    *,
    batch: int = 1,
    window: int = 8,
    capacity: int | None = None,
    snapshots: int = 0,
    program: int = 0,
) -> dict[str, int]:
    """The plan of a bundle not yet loaded by `ort`: `plan`, with what loading adds, estimated.

    `weights` are what ONNX Runtime keeps of them and maps. Besides the keys of `plan`: `program`
    (the `program` bytes given, and the code that loading brings in), `snapshots` (that many, with
    full KV caches), `loading` (the most there is while loading, before any state). `total` is the
    sum of the parts, or `loading` where that is more.
    """
    layout = StateLayout.of(
        manifest.model,
        batch=batch,
        capacity=capacity,
        dtypes=manifest.state_dtypes,
        logs=manifest.scan_logs,
    )
    kept, moment = _weights(manifest)
    out = plan(manifest.model, layout, window=window, chunk=manifest.limits.chunk, weights=kept)
    return with_loading(out, program + _LIBRARY, moment, snapshots)


def with_loading(
    plan: dict[str, int], program: int, weights: int, snapshots: int
) -> dict[str, int]:
    """The plan with what loading adds: see `plan_bundle`. `weights`: most of them while loading."""
    copies = snapshots * plan["snapshot"]
    plan |= {"program": program, "snapshots": copies, "loading": weights + program}
    plan["total"] = max(plan["total"] + program + copies, plan["loading"])
    return plan


def ring_bytes(layout: StateLayout, window: int) -> int:
    """What a state keeps of its last tokens: their states, or bases and logs."""
    slots = ring_slots(window, logged=bool(layout.logs))
    arrays = layout.kept(slots, ring_bases(window), slots)
    return sum(dtype.itemsize * math.prod(shape) for shape, dtype in arrays.values())


def _weights(manifest: Manifest) -> tuple[int, int]:
    """Bytes of the weights once loaded, and the most that loading them takes."""
    config, bits = manifest.model, manifest.quantization.bits
    files = sum(entry.size for entry in manifest.files if entry.path.endswith((".bin", ".onnx")))
    mamba = sum(layer.recurrent for layer in config.layers)
    nodes = mamba * _MAMBA_NODES + (len(config.layers) - mamba) * _OTHER_NODES
    # the table of embeddings is read where it lies in the file, in bytes at the least
    table = config.vocab_size * config.d_model * max(1, bits // 8)
    if bits in _LOADING:
        # experts' matrices stay as they are: which will be read is unknown
        stacked = sum(math.prod(shape) for shape in tensor_shapes(config).values() if shape[2:])
        size = _FLOAT * (parameters(config) - stacked) + bits // 8 * stacked
        return size + nodes + table, int(_LOADING[bits] * size) + nodes
    return int(_ROUNDED * files) + nodes + table, int(_LOADING_ROUNDED * files) + nodes


def workspace_bytes(config: ModelConfig, tokens: int, batch: int, capacity: int) -> int:
    """What the intermediate values of a run of `batch` × `tokens` take at most, estimated.

    One layer's values live at a time, but memory for attention over `capacity` tokens is taken
    apart from the others'. A Mamba-1 scan holds one array of tokens × state and about eight rows a
    token (for 256 tokens of a 130M-shaped model 30 to 44 MB measured, 45 estimated), Mamba-2 a few
    rows a token and matrices of tokens × tokens a head (44 MB measured, 52 estimated, 24 heads).
    """
    most = attention = 0
    for layer in config.layers:
        values = layer.workspace(tokens, capacity)
        if layer.attends:
            attention = max(attention, values)
        else:
            most = max(most, values)
    windows = {layer.looks_back for layer in config.layers if layer.looks_back is not None}
    # what each hides, and how far behind a token every other is, in int64
    if windows:
        attention += (len(windows) + 2) * max(tokens, capacity)
    return _FLOAT * batch * tokens * (most + attention + 4 * config.d_model) + _RUN


def most_of_runs(config: ModelConfig, chunk: int) -> int:
    """Bytes that ONNX Runtime may take for a model: a bound for graphs that want to take more, far
    above what any run of ours was seen to take.
    """
    layout = StateLayout.of(config)
    runs = _SPARE_RUNS * workspace_bytes(config, chunk, 1, layout.capacity)
    return _SPARE + 3 * _FLOAT * parameters(config) + runs


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, or None where the system does not say.

    The smallest of what the kernel reports, what the control group has left and what this process
    may still take by its limits (ulimit -v, -d).
    """
    found = [
        left
        for left in (_fields(_MEMINFO).get("MemAvailable"), _group(), _limits())
        if left is not None
    ]
    return min(found) if found else None


def check_fits(
    plan: Mapping[str, int],
    *,
    available: int | None = None,
    file: Path | None = None,
    error: type[EdgeError] = EngineError,
    remedy: str = "use a smaller quantization, window or capacity, or stop other programs",
) -> None:
    """Raises `error` when a plan's `total` exceeds the memory available.

    Nothing is refused where EDGE_MEMORY_CHECK=off, nor where the system does not say.
    """
    if os.environ.get(CHECK_VARIABLE, "").lower() in ("off", "0", "no"):
        return
    available = available_bytes() if available is None else available
    if available is not None and plan["total"] > available:
        raise error(
            f"needs {_mib(plan['total'])} of memory, {_mib(available)} are available",
            file=file,
            remedy=f"{remedy}; set {CHECK_VARIABLE}=off to try anyway",
        )


def check_weights(manifest: Manifest, path: Path) -> None:
    """Refuse a bundle whose weights alone have no room here. Raises EngineError."""
    weights = sum(entry.size for entry in manifest.files if entry.path.endswith(".bin"))
    check_load({"total": weights + LEAST + _mapped()}, path)


def check_address_space(path: Path) -> None:
    """Refuse any bundle where a limit leaves no room to read its manifest: the native code that
    does aborts. Raises EngineError.
    """
    if mapped := _mapped():
        check_load({"total": LEAST + mapped}, path)


def _mapped() -> int:
    """What counts of a limited address space besides memory; 0 without a limit."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return 0
    return _MAPPED + _STACK * (os.cpu_count() or 1)


def check_load(least: Mapping[str, int], path: Path) -> None:
    """Refuse a bundle that has no room here with the `least`, its plan with the smallest state.

    Raises EngineError.
    """
    remedy = "use a bundle of fewer bits (edge export --quant w4), or stop other programs"
    check_fits(least, file=path, remedy=remedy)


def check_state(plan: Mapping[str, int]) -> None:
    """Refuse a state, of an engine's `memory_plan`, that has no room. Raises StateError."""
    size = plan["state_ring"] + plan["kv_cache"] + plan["logits"]
    remedy = "use a smaller capacity, window or batch, or stop other programs"
    check_fits({"total": size}, error=StateError, remedy=remedy)


def trim() -> None:
    """Give the system back what was freed, where the C library would keep it (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Anonymous memory of this process, swapped or not; 0 where the system does not say."""
    fields = _fields("/proc/self/status")
    return fields.get("RssAnon", 0) + fields.get("VmSwap", 0)


def _limits() -> int | None:
    fields, found = _fields("/proc/self/status"), []
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and used in fields:
            found.append(max(0, most - fields[used]))
    return min(found, default=None)


def _group() -> int | None:
    """What the control groups (version 2) of this process have left; page cache counts as free.

    A limit may stand on any group above, and a container may show its own group as the root.
    """
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        lines = []
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    places = [GROUPS, *(GROUPS / part for part in _stems(own))]
    found = [left for left in map(_left, places) if left is not None]
    return min(found) if found else None


def _stems(path: str) -> list[str]:
    """`a/b` is `a` and `a/b`; a path outside, as `../a`, is none."""
    parts = path.split("/") if path else []
    return [] if ".." in parts else ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _left(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(cached.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def _fields(file: str) -> dict[str, int]:
    """`Name:  123 kB` lines as bytes."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return {}
    out = {}
    for line in lines:
        name, _, rest = line.partition(":")
        parts = rest.split()
        if len(parts) == 2 and parts[1] == "kB" and parts[0].isdigit():
            out[name] = int(parts[0]) * 1024
    return out


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
