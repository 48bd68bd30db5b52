"""Roofline: measured bandwidth and arithmetic of the machine, and the demand of a run.

Williams, Waterman, Patterson: "Roofline" (CACM 2009). A decode step reads every weight once, so its
bound is bytes ÷ bandwidth. A prefill chunk reads every weight once for all its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]

from edge.apps.measure.machine import ROOT, folders, text
from edge.apps.measure.stopwatch import Clock, seconds
from edge.config import ModelConfig
from edge.runtime.cuda.core import CoreDevice
from edge.runtime.cuda.device import Device
from edge.tensors import read_bytes, read_parameters

CACHES = 8  # size of the buffer, in last-level caches
_MIN_BUFFER, _MAX_BUFFER = 64 << 20, 1 << 30
_DEVICE_COPY = 4 << 30
_SIDE = 1024  # side of the matrices whose product measures arithmetic


@dataclass(frozen=True)
class Roof:
    """Measured limits of the machine or of a GPU.

    Attributes:
        read, copy: bytes per second. A copied byte counts twice, as it is read and written.
        buffer_bytes: size of the buffer.
        flops: fp32 operations per second of numpy's matrix product; None if not measured.
    """

    read: float
    copy: float
    buffer_bytes: int
    flops: float | None

    @property
    def bandwidth(self) -> float:
        """The best measured bandwidth, in bytes per second."""
        return max(self.read, self.copy)

    def to_dict(self) -> dict[str, Any]:
        return {
            "read_bytes_per_s": self.read,
            "copy_bytes_per_s": self.copy,
            "buffer_bytes": self.buffer_bytes,
            "fp32_flops_per_s": self.flops,
        }


def measure_roof(
    threads: int, *, size: int | None = None, arithmetic: bool = True, rounds: int = 5,
    clock: Clock = time.perf_counter,
) -> Roof:  # fmt: skip
    """Read a buffer far larger than the last-level cache, and copy half of it to the other half.

    Best of `rounds`. `threads`: number of threads that read and copy. Arithmetic is numpy's, with
    the default number of threads of its BLAS.
    """
    size = buffer_size() if size is None else size
    buffer = np.ones(size // 16 * 2, np.int64)
    source, target = np.split(buffer, 2)
    with ThreadPoolExecutor(threads) as pool:
        # both calls release the interpreter's lock, so the threads run in parallel
        def best(count: int, work: Callable[[slice], object]) -> float:
            edges = np.linspace(0, count, threads + 1).astype(int).tolist()
            parts = [slice(*pair) for pair in pairwise(edges)]
            return min(seconds(lambda: list(pool.map(work, parts)), clock) for _ in range(rounds))

        read_s = best(len(buffer), lambda part: buffer[part].max())
        copy_s = best(len(source), lambda part: np.copyto(target[part], source[part]))
    flops = _flops(rounds, clock) if arithmetic else None
    return Roof(buffer.nbytes / read_s, buffer.nbytes / copy_s, buffer.nbytes, flops)


def device_roof(device: Device, size: int | None = None, *, rounds: int = 5) -> Roof:
    """Copy a buffer inside the device's memory; best of `rounds`.

    The default size is 4 GiB, or an eighth of free memory on a small board: the copy must take
    milliseconds, because issuing it and waiting for it take microseconds. Neither reading alone nor
    arithmetic is measured.
    """
    if size is None:
        free = device.memory()[0] if isinstance(device, CoreDevice) else _MIN_BUFFER
        size = min(_DEVICE_COPY, free // 8)
    source, target = device.allocate(size), device.allocate(size)
    device.wait()

    def copy_once() -> None:
        device.copy(target, 0, source, 0, size)
        device.wait()

    speed = 2 * size / min(seconds(copy_once) for _ in range(rounds + 1))
    return Roof(speed, speed, size, None)


def _flops(rounds: int, clock: Clock) -> float:
    a = np.ones((_SIDE, _SIDE), np.float32)
    b, out = a.copy(), np.empty_like(a)
    times = [seconds(lambda: np.matmul(a, b, out=out), clock) for _ in range(rounds + 1)]
    return 2 * _SIDE**3 / min(times)


def buffer_size(root: Path = ROOT) -> int:
    """Return CACHES times the last-level cache, at most an eighth of free memory."""
    sizes = [_bytes(text(cache / "size")) for cache in folders(
        root / "sys/devices/system/cpu/cpu0/cache", "index*")]  # fmt: skip
    size = min(max(CACHES * max(sizes, default=0), _MIN_BUFFER), _MAX_BUFFER)
    return int(min(size, psutil.virtual_memory().available // 8))


def _bytes(size: str | None) -> int:
    """Parse `32768K` as bytes; 0 for anything else."""
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get((size or " ")[-1], 1)
    digits = (size or "").rstrip("KMG")
    return int(digits) * unit if digits.isdigit() else 0


@dataclass(frozen=True)
class Demand:
    """Memory traffic and arithmetic of a run of `tokens`.

    Attributes:
        bytes: weights read, and recurrent state read and written. KV caches are not counted.
        flops: two per weight and token. The scan is not counted.
    """

    tokens: int
    bytes: int
    flops: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


def work(config: ModelConfig, weight_bytes: int, state_bytes: int, tokens: int) -> Demand:
    """Return the demand of a run of `tokens`; see `edge.tensors.read_bytes`."""
    table = config.vocab_size * config.d_model
    looked_up = 0 if config.tie_embeddings else table
    head = config.head_size * config.d_model
    read = read_bytes(config, weight_bytes, tokens)
    # the head computes logits of the last token only
    products = tokens * (read_parameters(config) - table - looked_up) + head
    return Demand(tokens, read + 2 * state_bytes, 2.0 * products)


def bound_s(demand: Demand, roof: Roof) -> float:
    """Return the minimum seconds of a run: the time to read and write its bytes.

    Arithmetic does not count, because 8-bit products can be faster than the measured fp32 products.
    """
    return demand.bytes / roof.bandwidth
