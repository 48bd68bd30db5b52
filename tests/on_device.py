"""Where tests run kernels: in Triton's interpreter or, with EDGE_TEST_DEVICE=cuda, on a GPU.

On a GPU they take the way that a bundle's kernels take: compiled ahead of time, loaded and launched
by `CoreDevice`. EDGE_TEST_VARIANTS names a folder in which to note what would have to be compiled;
tests are then skipped where they would run a kernel (`tests/gpu/pack.sh`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edge.launch import Variant
from edge.plugins.compiler.interpreter import InterpretDevice
from edge.runtime.cuda.core import CoreDevice
from edge.runtime.cuda.device import Device
from tests.gpu.variants import write

ON_GPU = os.environ.get("EDGE_TEST_DEVICE", "cpu") != "cpu"
NOTES = os.environ.get("EDGE_TEST_VARIANTS", "")


@functools.cache
def gpu() -> CoreDevice:
    """The GPU of this process."""
    return CoreDevice(limit_s=60)


def device_with(variants: Iterable[Variant]) -> tuple[Device, list[Any]]:
    """The device, and the variants loaded for it in their order."""
    every = list(variants)
    note(every)
    if ON_GPU:
        return gpu(), compiled_for(gpu(), every)
    device = InterpretDevice() if not NOTES else _Noting()
    return device, [device.load(each, None, b"") for each in every]


def compiled_for(device: CoreDevice, variants: list[Variant]) -> list[Any]:
    """The variants, compiled for this GPU as an exporter compiles them."""
    from edge.plugins.compiler.aot import compile_variants

    made = compile_variants(variants, [device.sm])[device.sm]
    return [device.load(each, *made.get(each)) for each in variants]


def note(variants: Iterable[Variant]) -> None:
    """Keep what would be compiled, if anybody asks."""
    if NOTES:
        write(Path(NOTES), variants)


def same_sums(found: Tensor, expected: Tensor) -> bool:
    """Whether two kernels' fp32 sums of the same terms agree: bit for bit when interpreted.

    Compiled, each kernel has its own order within a thread: at most 10⁻⁵ of the largest sum apart
    (measured on an H100: 2·10⁻⁶).
    """
    if not ON_GPU:
        return torch.equal(found, expected)
    apart = float((found - expected).abs().max())
    return found.shape == expected.shape and apart <= 1e-5 * float(expected.abs().max())


class _Noting(InterpretDevice):
    def launch(self, *_: object) -> None:
        """The variants are noted; what they compute is not asked for."""
        pytest.skip("noted what it would launch")
