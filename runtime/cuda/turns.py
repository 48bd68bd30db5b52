"""Serialized access of threads to a device's context, deferred frees, forks and device loss."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from edge.errors import EngineError
from edge.runtime.cuda.faults import DriverFaults
from edge.runtime.cuda.install import Modules
from edge.runtime.cuda.place import GpuStream
from edge.runtime.request import Hold

_Free = Callable[[Any], Any]
# how long closing a device waits for its work; after that, process exit frees the memory
_CLOSE_TIMEOUT_S = 10.0
_REFUSAL = "the device is in use by another thread"
_REMEDY = "let threads take turns, or give each an engine of its own"
_live_turns: weakref.WeakSet[DriverTurns] = weakref.WeakSet()


class DriverTurns:
    """Turns of threads to call the driver: `with turns:`, in a block that does not yield.

    A turn is refused, without waiting, while another thread holds one or records a graph, because
    the threads would interleave their launches. Afterwards the previously current context is
    restored; a thread that had none keeps the device's.

    Attributes:
        recorder: id of the thread that is recording a graph, or None.
    """

    def __init__(self, modules: Modules, faults: DriverFaults, place: GpuStream) -> None:
        self.faults = faults
        self.recorder: int | None = None
        self.api = modules.api
        self._place = place
        self._context = int(place.context)
        self._hold = Hold(_REFUSAL, _REMEDY)
        self._pushed = False
        self._freeing: list[tuple[_Free, Any]] = []
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        _live_turns.add(self)
        weakref.finalize(self, _close, faults, modules.api, place, self._freeing).atexit = False

    def __enter__(self) -> None:
        self.faults.refuse_lost()
        if self.recorder not in (None, threading.get_ident()):
            raise EngineError(_REFUSAL, remedy=_REMEDY)
        self._hold.take(sys._getframe(1))
        try:
            self._enter()
            self.free_now()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        self._leave()

    def _enter(self) -> None:
        doing = "entering the context"
        current = int(self.faults.check(self.api.cuCtxGetCurrent(), doing))
        if current == self._context:
            return
        if current:
            self.faults.check(self.api.cuCtxPushCurrent(self._place.context), doing)
            self._pushed = True
        else:
            self.faults.check(self.api.cuCtxSetCurrent(self._place.context), doing)

    def _leave(self) -> None:
        if self._pushed:
            self._pushed = False
            self.api.cuCtxPopCurrent()
        if self.faults.lost is not None:
            self.abandon(self.faults.lost)
        self._hold.release()

    # -- frees and loss --------------------------------------------------------------------------

    def hold(self, holder: Any) -> None:
        """Track an owner of cuda-core objects, whose destructors call the driver."""
        self._holders.add(holder)

    def keep(self, holder: Any, objects: list[Any]) -> None:
        """Clear `objects`, whose destructors call the driver, once `holder` is dead and the stream
        is idle. On a lost device they are never cleared.
        """
        foreign = _ForeignObjects(objects)
        self.hold(foreign)
        weakref.finalize(holder, self.free, _ForeignObjects.clear, foreign).atexit = False

    def free(self, release: _Free, handle: Any) -> None:
        """Call `release(handle)` when the stream is idle; never raises. For finalizers.

        A finalizer may run on any thread at any point. Nothing is freed while a graph is recorded:
        the driver would refuse, or the graph would become invalid. Nothing is freed while work is
        in flight: the driver would wait for it, perhaps forever.
        """
        if self.faults.lost is not None:
            return
        self._freeing.append((release, handle))
        if self.recorder is not None:
            return
        try:
            self._hold.take(sys._getframe())
        except EngineError:  # whoever holds the turn frees it, now or later
            return
        try:
            self._enter()
            self.free_now()
        except Exception:
            # interpreter shutdown, or a context destroyed by its owner: process exit frees it
            pass
        finally:
            self._leave()

    def free_now(self) -> None:
        """Release what is waiting to be freed if the stream is idle. The caller holds a turn."""
        if (
            self.recorder is not None
            or not self._freeing
            or int(self.api.cuStreamQuery(self._place.handle)[0])
        ):
            return
        while self._freeing and self.faults.lost is None:
            release, handle = self._freeing.pop()
            self.faults.check(release(handle), "freeing memory")

    @property
    def freeing(self) -> bool:
        """Whether anything is waiting to be freed."""
        return bool(self._freeing)

    def abandon(self, reason: str) -> None:
        """Mark the device as lost and leak its objects: destroying them would wait for work that
        may never end.
        """
        self.faults.lose(reason)
        self._freeing.clear()
        for holder in list(self._holders):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))
        self._holders.clear()


class _ForeignObjects:
    """Another library's objects."""

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects

    def clear(self) -> tuple[int]:
        """Drop the objects and return a success code like a driver call."""
        self._objects.clear()
        return (0,)


def _close(
    faults: DriverFaults, api: Any, place: GpuStream, freeing: list[tuple[_Free, Any]]
) -> None:
    """Finalize a device: release what is still waiting to be freed, and destroy its stream."""
    if faults.lost is not None:
        return
    try:
        api.cuCtxPushCurrent(place.context)
        started = time.monotonic()
        while int(code := api.cuStreamQuery(place.handle)[0]) and _should_wait(api, code, started):
            time.sleep(1e-4)
        if not int(code):
            for release, handle in freeing:
                release(handle)
        if place.owner is None:
            api.cuStreamDestroy(place.handle)
        api.cuCtxPopCurrent()
    except Exception:
        pass


def _should_wait(api: Any, code: Any, started: float) -> bool:
    """Return whether work is in flight and closing the device should still wait for it."""
    return (
        code == api.CUresult.CUDA_ERROR_NOT_READY and time.monotonic() - started < _CLOSE_TIMEOUT_S
    )


def _abandon_after_fork() -> None:
    for turns in list(_live_turns):
        turns.abandon("CUDA does not outlive a fork")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_after_fork)
