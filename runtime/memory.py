"""How much memory a model will take, asked before it is loaded and answered again after."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from pathlib import Path

from edge.bundle import Manifest
from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, ModelConfig
from edge.errors import EngineError
from edge.runtime.layout import StateLayout
from edge.runtime.ring import slots_for

_MEMINFO = "/proc/meminfo"
_FLOAT = 4


def plan(
    config: ModelConfig, layout: StateLayout, *, window: int, chunk: int, weights: int
) -> dict[str, int]:
    """Bytes by purpose.

    Keys: `weights` (resident, packed copies included), `state_ring` (every slot), `kv_cache`,
    `logits` (of a run of `window` tokens), `workspace` (estimated, of a run of `chunk` tokens),
    `total` of these, and, not in the total, `state` (one recurrent state) and `snapshot` (one,
    with full KV caches).
    """
    state, cache = layout.slot_bytes, layout.cache_bytes
    out = {
        "weights": weights,
        "state_ring": slots_for(window) * state,
        "kv_cache": cache,
        "logits": _FLOAT * (window + 1) * layout.batch * config.vocab_size,
        "workspace": workspace_bytes(config, chunk * layout.batch),
    }
    out["total"] = sum(out.values())
    out["state"] = state
    out["snapshot"] = state + cache
    return out


def plan_bundle(
    manifest: Manifest, *, batch: int = 1, window: int = 8, capacity: int | None = None
) -> dict[str, int]:
    """The plan of a bundle not yet loaded, as `plan`, with `weights` estimated from its files.

    Loading was seen to take 1.1 times the file (8-bit blocks and fp32, 24 Mamba layers), and 1.25
    times for int8, whose largest matrix is kept twice.
    """
    files = sum(entry.size for entry in manifest.files if entry.path.endswith((".bin", ".onnx")))
    layout = StateLayout.of(
        manifest.model, batch=batch, capacity=capacity, dtypes=manifest.state_dtypes
    )
    return plan(
        manifest.model,
        layout,
        window=window,
        chunk=manifest.limits.chunk,
        weights=files + files // 4,
    )


def workspace_bytes(config: ModelConfig, tokens: int) -> int:
    """What the intermediate values of a run of `tokens` take at most, estimated.

    One layer's values live at a time. A Mamba-1 scan holds about four arrays of tokens × state
    (105 MB measured, 101 estimated, for 256 tokens of a 130M-shaped model); the others hold a few
    rows a token and matrices of tokens × tokens a head.
    """
    most = 0
    for layer in config.layers:
        if isinstance(layer, Mamba1Config):
            values = 4 * layer.d_inner * layer.d_state
        elif isinstance(layer, Mamba2Config):
            values = 4 * layer.in_proj_rows + 5 * layer.n_heads * tokens
        elif isinstance(layer, AttentionConfig):
            values = 4 * layer.n_heads * layer.head_dim + 2 * layer.n_heads * tokens
        else:
            values = 3 * layer.d_intermediate
        most = max(most, values)
    return _FLOAT * tokens * (most + 4 * config.d_model)


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, or None where the system does not say.

    The smaller of what the kernel reports and what the control group has left.
    """
    found = [left for left in (_system(), _group()) if left is not None]
    return min(found) if found else None


def check_fits(plan: Mapping[str, int], *, available: int | None = None) -> None:
    """Raises EngineError when a plan's `total` exceeds the memory available."""
    available = available_bytes() if available is None else available
    if available is not None and plan["total"] > available:
        raise EngineError(
            f"needs {_mib(plan['total'])} of memory, {_mib(available)} are available",
            remedy="use a smaller quantization, window or capacity, or stop other programs",
        )


def trim() -> None:
    """Give the system back what was freed, where the C library would keep it (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Anonymous memory of this process, swapped or not; 0 where the system does not say."""
    fields = _fields("/proc/self/status")
    return fields.get("RssAnon", 0) + fields.get("VmSwap", 0)


def _system() -> int | None:
    return _fields(_MEMINFO).get("MemAvailable")


def _group() -> int | None:
    """What the control group (version 2) has left; page cache counts as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        cached = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(cached.get("inactive_file", 0)))


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
