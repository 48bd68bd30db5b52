"""A device used by one thread at a time, and copies between it and ordinary arrays."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.runtime.cuda.device import Bytes, Device, Memory
from edge.runtime.engine import forked
from edge.runtime.state import Hold

STAGING = 4 << 20

Array = NDArray[Any]
# device memory, an offset in it, and an array that is copied to or from there
Transfer = tuple[Memory, int, Array]


class Exclusive:
    """A device, its lock and a staging buffer; `with` it before anything is issued. A second thread
    waits.

    Raises EngineError in a process that was forked from the one it was made in: a driver's context
    does not survive that.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._hold = Hold("the device is in use", "wait for it", waits=True)
        self._pid = os.getpid()
        self._staging = device.host(STAGING)
        self._left = False

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise forked("device is")

    def __enter__(self) -> Device:
        self.check_process()
        self._hold.take(sys._getframe(1))
        if self._left:
            # what an interrupt left running still reads memory that is about to be written
            try:
                self.device.wait()
            except BaseException:
                self._hold.release()
                raise
            self._left = False
        return self.device

    def __exit__(self, kind: object, *_: object) -> None:
        self._left = self._left or kind is not None
        self._hold.release()

    def download(self, pieces: Iterable[Transfer]) -> None:
        """Fill the arrays from the device's memory."""
        self._staged(pieces, fetch=True)

    def upload(self, pieces: Iterable[Transfer]) -> None:
        """Copy the arrays into the device's memory."""
        self._staged(pieces, fetch=False)

    def _staged(self, pieces: Iterable[Transfer], *, fetch: bool) -> None:
        with self:
            used = 0
            arrived: list[tuple[Bytes, Bytes]] = []
            for memory, at, array in pieces:
                flat: Bytes = array.reshape(-1).view(np.uint8)
                start = 0
                while start < flat.size:
                    if used == STAGING:
                        self._land(arrived)
                        used = 0
                    size = min(flat.size - start, STAGING - used)
                    stage, part = self._staging[used : used + size], flat[start : start + size]
                    if fetch:
                        self.device.read(stage, memory, at + start)
                        arrived.append((part, stage))
                    else:
                        stage[:] = part
                        self.device.write(memory, at + start, stage)
                    start, used = start + size, used + size
            self._land(arrived)

    def _land(self, arrived: list[tuple[Bytes, Bytes]]) -> None:
        self.device.wait()
        for part, stage in arrived:
            part[:] = stage
        arrived.clear()
