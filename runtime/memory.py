"""Estimates of a model's memory, before and after it is loaded, and checks against what is free."""

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
REMEDY = "use a bundle of fewer bits, as edge export --quant w4 makes, or stop other programs"
_MEMINFO = "/proc/meminfo"
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FLOAT_BYTES = 4

# Measured as growth of anonymous and file-backed resident memory, ONNX Runtime 1.31.1 and 1.23.2,
# x86-64: 24 Mamba layers of 768 (129 M parameters) in fp32, fp16, w8, w4, w8a8; demonstrations.
# The estimate was 1.04 to 1.26 times the measured total; 1.25 for a hybrid with 4096 tokens of
# context. `edge profile BUNDLE --json` gives a bundle's own figures, under `memory`.
# A process that has imported the runtime and loaded nothing holds 68 MB.
PROGRAM = 68_000_000
# ONNX Runtime's own code, paged in by loading (8 MB) and by the first runs (4 to 8 MB).
_LIBRARY_BYTES = 14_000_000
# Minimum that any engine takes besides weights and states.
LEAST = 12_000_000
# Bytes per layer for a session's nodes, without weights: 21 to 24 MB for 24 Mamba layers.
_MAMBA_NODE_BYTES, _OTHER_NODE_BYTES = 900_000, 300_000
# Quantized weights with unpacked scales, relative to the files: 1.02 (w8), 1.08 (w8a8), 1.17 (w4).
_QUANTIZED_FACTOR = 1.1
# Peak while loading. fp16 is widened to fp32 before it is packed: 2.0 to 2.2 times the fp32 size;
# fp32: 1.45; quantized: 1.3 to 1.7 times the files.
_LOADING_PEAK = {32: 1.5, 16: 2.1}
_QUANTIZED_PEAK = 1.7
# A limited address space also counts what is mapped and never touched: libraries, thread stacks.
# Native code aborts if it runs short of that: measured up to 30 MB with two threads.
_MAPPED_BYTES, _STACK_BYTES = 32_000_000, 8_000_000
# Heap, bindings and the minimum of an arena.
_RUN_BYTES = 4_000_000
# Copies of one layer's keys and values, in units of the fp16 cache: the valid rows in fp16 and in
# fp32, and in fp32 with the new tokens.
_WIDENED_COPIES = 2 * (1 + 2 + 2)
# Limit on ONNX Runtime's memory: room for parallel runs, wide batches and transposed weights.
_SPARE_BYTES, _SPARE_RUNS = 1 << 28, 16


def plan(
    config: ModelConfig,
    layout: StateLayout,
    *,
    window: int,
    chunk: int,
    weights: int,
    widens: bool = True,
) -> dict[str, int]:
    """Return bytes by purpose.

    Keys: `weights` (resident, with packed copies), `state_ring` (all slots, bases and logs),
    `kv_cache`, `logits` (of a run of `window` tokens), `workspace` (of a run of `chunk` tokens,
    estimated) and their `total`. Not in the total: `state` (one recurrent state) and `snapshot`
    (one, with full KV caches and no token pending). `widens`: whether attention copies fp16 caches
    to fp32, as ONNX Runtime does.
    """
    state, cache = layout.slot_bytes, layout.cache_bytes
    # with attention, several sequences run one token at a time
    tokens = 1 if layout.batch > 1 and config.has_attention else chunk
    out = {
        "weights": weights,
        "state_ring": ring_bytes(layout, window),
        "kv_cache": cache,
        "logits": _FLOAT_BYTES * (window + 1) * layout.batch * config.vocab_size,
        "workspace": workspace_bytes(config, tokens, layout.batch, layout.capacity),
    }
    if widens:
        out["workspace"] += _WIDENED_COPIES * _largest_half_cache(layout)
    out["total"] = sum(out.values())
    out["state"] = state
    out["snapshot"] = state + cache
    return out


def _largest_half_cache(layout: StateLayout) -> int:
    """Return the bytes of the largest fp16 KV cache."""
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
    """Estimate the memory of a bundle that `ort` has not loaded yet: `plan`, and loading itself.

    `weights` are the bytes that ONNX Runtime keeps or maps. Additional keys: `program` (the
    `program` bytes given, and the code that loading pages in), `snapshots` (the given number, with
    full KV caches), `loading` (the peak while loading, before any state). `total` is the sum of the
    parts, or `loading` if that is larger.
    """
    layout = StateLayout.of(
        manifest.model,
        batch=batch,
        capacity=capacity,
        dtypes=manifest.state_dtypes,
        logs=manifest.scan_logs,
    )
    resident, peak = _weight_bytes(manifest)
    out = plan(manifest.model, layout, window=window, chunk=manifest.limits.chunk, weights=resident)
    return with_loading(out, program + _LIBRARY_BYTES, peak, snapshots)


def with_loading(
    plan: dict[str, int], program: int, weights: int, snapshots: int
) -> dict[str, int]:
    """Add loading to a plan: see `plan_bundle`. `weights`: their peak bytes while loading."""
    copies = snapshots * plan["snapshot"]
    plan |= {"program": program, "snapshots": copies, "loading": weights + program}
    plan["total"] = max(plan["total"] + program + copies, plan["loading"])
    return plan


def ring_bytes(layout: StateLayout, window: int) -> int:
    """Return the bytes of a state's history: states of its last tokens, or bases and logs."""
    slots = ring_slots(window, logged=bool(layout.logs))
    arrays = layout.kept(slots, ring_bases(window), slots)
    return sum(dtype.itemsize * math.prod(shape) for shape, dtype in arrays.values())


def _weight_bytes(manifest: Manifest) -> tuple[int, int]:
    """Return the bytes of the weights once loaded, and the peak while loading them."""
    config, bits = manifest.model, manifest.quantization.bits
    files = sum(entry.size for entry in manifest.files if entry.path.endswith((".bin", ".onnx")))
    mamba = sum(layer.recurrent for layer in config.layers)
    nodes = mamba * _MAMBA_NODE_BYTES + (len(config.layers) - mamba) * _OTHER_NODE_BYTES
    # the embedding table is mapped from the file, in at least one byte per value
    table = config.vocab_size * config.d_model * max(1, bits // 8)
    if bits in _LOADING_PEAK:
        # experts' matrices are not packed, as it is unknown which will be read
        stacked = sum(math.prod(shape) for shape in tensor_shapes(config).values() if shape[2:])
        size = _FLOAT_BYTES * (parameters(config) - stacked) + bits // 8 * stacked
        return size + nodes + table, int(_LOADING_PEAK[bits] * size) + nodes
    return int(_QUANTIZED_FACTOR * files) + nodes + table, int(_QUANTIZED_PEAK * files) + nodes


def workspace_bytes(config: ModelConfig, tokens: int, batch: int, capacity: int) -> int:
    """Estimate the maximum bytes of the intermediate values of a run of `batch` × `tokens`.

    One layer's values are live at a time, but attention over `capacity` tokens has memory of its
    own. A Mamba-1 scan holds one array of tokens × state and about eight rows per token (for 256
    tokens of a 130M-shaped model 30 to 44 MB measured, 45 estimated). Mamba-2 holds a few rows per
    token and a matrix of tokens × tokens per head (44 MB measured, 52 estimated, 24 heads).
    """
    largest = attention = 0
    for layer in config.layers:
        values = layer.workspace(tokens, capacity)
        if layer.attends:
            attention = max(attention, values)
        else:
            largest = max(largest, values)
    windows = {layer.looks_back for layer in config.layers if layer.looks_back is not None}
    # one mask per window, and the distances between tokens in int64
    if windows:
        attention += (len(windows) + 2) * max(tokens, capacity)
    return _FLOAT_BYTES * batch * tokens * (largest + attention + 4 * config.d_model) + _RUN_BYTES


def most_of_runs(config: ModelConfig, chunk: int) -> int:
    """Return the limit on ONNX Runtime's memory for a model.

    It stops malicious graphs, and is far above any measured run of an exported graph.
    """
    layout = StateLayout.of(config)
    runs = _SPARE_RUNS * workspace_bytes(config, chunk, 1, layout.capacity)
    return _SPARE_BYTES + 3 * _FLOAT_BYTES * parameters(config) + runs


def available_bytes() -> int | None:
    """Return the memory available without swapping, or None if the system does not report it.

    This is the smallest of what the kernel reports, what the control group has left and what the
    limits of this process (ulimit -v, -d) leave.
    """
    limits = [
        limit
        for limit in (
            _fields(_MEMINFO).get("MemAvailable"),
            _cgroup_available(),
            _rlimit_available(),
        )
        if limit is not None
    ]
    return min(limits) if limits else None


def check_fits(
    plan: Mapping[str, int],
    *,
    available: int | None = None,
    file: Path | None = None,
    error: type[EdgeError] = EngineError,
    remedy: str = "use a smaller quantization, window or capacity, or stop other programs",
) -> None:
    """Raise `error` if a plan's `total` exceeds the available memory.

    Does nothing if EDGE_MEMORY_CHECK=off or if the system does not report its memory.
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
    """Raise EngineError if a bundle's weights alone do not fit into memory."""
    weights = sum(entry.size for entry in manifest.files if entry.path.endswith(".bin"))
    check_load({"total": weights + LEAST + _address_space_overhead()}, path)


def check_address_space(path: Path) -> None:
    """Raise EngineError if the address space is too limited to read a manifest.

    The native code that reads it would abort.
    """
    if overhead := _address_space_overhead():
        check_load({"total": LEAST + overhead}, path)


def _address_space_overhead() -> int:
    """Return the bytes that a limited address space needs besides memory; 0 without a limit."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return 0
    return _MAPPED_BYTES + _STACK_BYTES * (os.cpu_count() or 1)


def check_load(least: Mapping[str, int], path: Path) -> None:
    """Raise EngineError if a bundle does not fit. `least`: its plan with the smallest state."""
    check_fits(least, file=path, remedy=REMEDY)


def check_state(plan: Mapping[str, int]) -> None:
    """Raise StateError if a state does not fit. `plan`: from an engine's `memory_plan`."""
    size = plan["state_ring"] + plan["kv_cache"] + plan["logits"]
    remedy = "use a smaller capacity, window or batch, or stop other programs"
    check_fits({"total": size}, error=StateError, remedy=remedy)


def trim() -> None:
    """Return freed memory to the system, which glibc would keep."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Return the anonymous memory of this process, swapped or not; 0 if not reported."""
    fields = _fields("/proc/self/status")
    return fields.get("RssAnon", 0) + fields.get("VmSwap", 0)


def _rlimit_available() -> int | None:
    fields, remaining = _fields("/proc/self/status"), []
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        maximum = resource.getrlimit(limit)[0]
        if maximum != resource.RLIM_INFINITY and used in fields:
            remaining.append(max(0, maximum - fields[used]))
    return min(remaining, default=None)


def _cgroup_available() -> int | None:
    """Return what the control groups (v2) of this process have left; page cache counts as free.

    Any ancestor group may have a limit, and a container may show its own group as the root.
    """
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        lines = []
    own_path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    groups = [GROUPS, *(GROUPS / part for part in _with_ancestors(own_path))]
    limits = [free for free in map(_cgroup_left, groups) if free is not None]
    return min(limits) if limits else None


def _with_ancestors(path: str) -> list[str]:
    """Return the path and its ancestors: `a` and `a/b` for `a/b`, none for `../a`."""
    parts = path.split("/") if path else []
    return [] if ".." in parts else ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _cgroup_left(group: Path) -> int | None:
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
    """Return name → bytes from lines like `Name:  123 kB`."""
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
