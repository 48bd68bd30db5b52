"""Upload of a bundle's weights to device memory, verified while reading."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from edge.errors import BundleError
from edge.launch import ITEM_SIZE, LaunchPlan, Weight
from edge.runtime.cuda.device import ALIGNMENT, Exclusive, Memory
from edge.runtime.layout import packed

if TYPE_CHECKING:
    from edge.bundle import Bundle

# A driver may find room for many medium blocks where it has none for one of several gigabytes.
SEGMENT = 256 << 20
_BLOCK = 4 << 20


class WeightSegment:
    """A range of weights.bin, `start` to `end`, stored on the device at byte `at` of `memory`."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.memory: Memory | None = None
        self.at = 0


class DeviceWeights:
    """Device memory behind a plan's `weight` and `inline` pointers.

    Attributes:
        nbytes: device memory in bytes.
        read_by: kernels that the weights were repacked for; None while they are as in the file.
    """

    read_by: object = None

    def __init__(self, plan: LaunchPlan, exclusive: Exclusive) -> None:
        self._plan = plan
        self._exclusive = exclusive
        self._segments = segments(plan.weights)
        constants = {
            name: max(1, len(constant.data) // 2) for name, constant in plan.inline.items()
        }
        self._inline, size = packed(constants, ALIGNMENT)
        self.nbytes = size
        with exclusive as device:
            self._constants = device.allocate(max(1, size))
            for group in pieces(self._segments):
                last = group[-1]
                memory = device.allocate(last.at + last.end - last.start)
                self.nbytes += memory.nbytes
                for segment in group:
                    segment.memory = memory
        exclusive.upload(
            (
                self._constants,
                offset,
                np.frombuffer(bytes.fromhex(plan.inline[name].data), np.uint8),
            )
            for name, offset in self._inline.items()
        )

    def read(self, blocks: Iterable[bytes]) -> None:
        """Fill the weights from consecutive blocks of weights.bin.

        Raises BundleError if the blocks end before the last weight.
        """
        at = 0
        for block in blocks:
            data = np.frombuffer(block, np.uint8)
            self._exclusive.upload(
                (segment.memory, segment.at + max(at, segment.start) - segment.start,
                 data[max(at, segment.start) - at : min(at + len(data), segment.end) - at])
                for segment in self._segments
                if segment.memory is not None
                and segment.start < at + len(data)
                and at < segment.end
            )  # fmt: skip
            at += len(data)
        if self._segments and at < self._segments[-1].end:
            raise BundleError(f"ends at byte {at}, the plan reads {self._segments[-1].end}")

    def address(self, name: str) -> int:
        """Return the device address of a weight."""
        offset = self._plan.weights[name].offset
        for segment in self._segments:
            if segment.start <= offset < segment.end:
                assert segment.memory is not None
                return segment.memory.address + segment.at + offset - segment.start
        raise BundleError("is in no segment of the weights", field=f"weights.{name}")

    def addresses(self) -> dict[str, int]:
        """Return the device address of each weight."""
        return {name: self.address(name) for name in self._plan.weights}

    def inline(self, name: str) -> int:
        """Return the device address of an inline constant."""
        return self._constants.address + self._inline[name]


def segments(weights: Mapping[str, Weight], largest: int = SEGMENT) -> list[WeightSegment]:
    """Group weights into file ranges of at most `largest` bytes, without the gaps between them.

    A single larger weight forms its own range. Each range starts at the multiple of 256 bytes at or
    before its first weight, so that weights are aligned on the device as in the file.
    """
    out: list[WeightSegment] = []
    for weight in sorted(weights.values(), key=lambda weight: weight.offset):
        start = weight.offset - weight.offset % ALIGNMENT
        end = weight.offset + max(1, weight.elements * ITEM_SIZE[weight.dtype])
        last = out[-1] if out else None
        # weights that share bytes stay together
        shared = last is not None and weight.offset < last.end
        near = last is not None and start - last.end < ALIGNMENT and end - last.start <= largest
        if last is not None and (shared or near):
            last.end = max(last.end, end)
        else:
            out.append(WeightSegment(start, end))
    return out


def pieces(every: list[WeightSegment]) -> list[list[WeightSegment]]:
    """Group segments into allocations and place each at a multiple of 256 bytes.

    An allocation has at most SEGMENT bytes, unless a single segment is larger. Large allocations
    get large pages, which a CPU reads 1.7 times as fast as small ones.
    """
    out: list[list[WeightSegment]] = []
    used = 0
    for segment in every:
        at = used + -used % ALIGNMENT
        if not out or at + segment.end - segment.start > SEGMENT:
            out.append([])
            at = 0
        segment.at = at
        out[-1].append(segment)
        used = at + segment.end - segment.start
    return out


def upload(bundle: Bundle, path: str, weights: DeviceWeights) -> None:
    """Read the bundle's file `path` once, hashing it and copying it to the device.

    Raises BundleError if it does not match the manifest. The weights must then not be used.
    """
    fd, entry = bundle.fd(path), bundle.manifest.entry(path)
    assert entry is not None
    digest = hashlib.sha256()

    def blocks() -> Iterable[bytes]:
        at = 0
        while at < entry.size and (block := os.pread(fd, min(_BLOCK, entry.size - at), at)):
            digest.update(block)
            at += len(block)
            yield block
            if bundle.on_progress is not None:
                bundle.on_progress("loading", at, entry.size)

    weights.read(blocks())
    if digest.hexdigest() != entry.sha256:
        raise BundleError("changed while it was read", file=bundle.path / path)
