"""Disk faults and kills while an engine is stored leave the old one, the new one, or none."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edge.errors import EngineError
from edge.runtime.tensorrt import cache, sealed
from tests.faulty_calls import FaultyCalls, built, in_child
from tests.tensorrt.test_cache import HERE, SIZES

# a disk that stays full, one that is full for a moment, one that fails for a moment
FAULTS = ((errno.ENOSPC, True), (errno.ENOSPC, False), (errno.EIO, False))
SIZE = 30_000


@pytest.fixture(scope="module")
def shim() -> Path:
    return built()


def store(number: int) -> None:
    cache.store(HERE, SIZES, bytes([number]) * SIZE, {})


def kept() -> int | None:
    """Return the stored engine; every byte of it is checked."""
    if cache.there(HERE, SIZES) is None:
        return None
    with cache.find("m", HERE, SIZES) as found:
        body = bytes(found.body)
    assert len(body) == SIZE and len(set(body)) == 1
    return body[0]


def names(place: Path) -> set[str]:
    return {entry.name for entry in place.iterdir()}


def calls_of(faulty: FaultyCalls, folder: Path, act: Callable[[], object]) -> list[str]:
    faulty.watch(folder)
    act()
    return [call.partition(":")[0] for call in faulty.rest()]


def refuse_every_call(name: str) -> None:
    """Fail every call, while storing the first engine (with its key) and while storing another."""
    folder, faulty = Path(name), FaultyCalls()
    for first in (True, False):
        place = folder / f"{first}" / "engines"
        os.environ["EDGE_CACHE"] = str(place.parent)
        place.parent.mkdir()
        calls = calls_of(faulty, folder, lambda: store(1))
        for at in range(len(calls)):
            for problem, sticky in FAULTS:
                refuse(faulty, folder, place, (at, problem, sticky), first=first)


def refuse(
    faulty: FaultyCalls, folder: Path, place: Path, fault: tuple[int, int, bool], *, first: bool
) -> None:
    if first:
        for path in place.iterdir() if place.exists() else ():
            path.unlink()
        before = None
    else:
        store(1)
        before = 1
    at, problem, sticky = fault
    faulty.watch(folder, at, problem, sticky=sticky)
    try:
        store(2)
    except EngineError as error:
        seen = faulty.rest()
        assert error.remedy is not None, (fault, error)
        # the folder's own fsync comes after the new one is in place
        assert kept() == before or "rename" in [call.partition(":")[0] for call in seen], fault
    else:
        faulty.rest()
        assert kept() == 2, fault
    assert kept() in (before, 2), fault
    store(3)
    assert kept() == 3
    leftovers = {each for each in names(place) if each.startswith(".")}
    # a key that could not be made has a random name: a broken disk does not remove it either
    assert not leftovers or sticky, (fault, leftovers)


def test_every_call_of_keeping_an_engine_refused(shim: Path, tmp_path: Path) -> None:
    in_child(refuse_every_call, tmp_path, shim=shim)


def kill_at_every_call(name: str) -> None:
    folder, faulty = Path(name), FaultyCalls()
    os.environ["EDGE_CACHE"] = str(folder / "cache")
    (folder / "cache").mkdir()
    store(1)
    calls = calls_of(faulty, folder, lambda: store(1))
    assert {"create", "write", "fsync", "rename"} <= set(calls)
    place = sealed.folder()
    for at in range(len(calls)):
        for how in (FaultyCalls.KILL_BEFORE, FaultyCalls.KILL_AFTER):
            child = os.fork()
            if child == 0:
                faulty.watch(folder, at, how)
                store(2)
                os._exit(1)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), (at, how)
            found = kept()
            assert found in (1, 2), (at, how)
            assert found == 1 or at >= calls.index("rename"), (at, how)
            store(1)
            assert kept() == 1
            assert names(place) == {"key", Path(cache.name(HERE, SIZES)).name}, (at, how)


def test_killed_at_every_call_of_keeping_an_engine(shim: Path, tmp_path: Path) -> None:
    in_child(kill_at_every_call, tmp_path, shim=shim)


def use_readonly(name: str) -> None:
    """Engines are found on a read-only disk; nothing can be built there."""
    folder, faulty = Path(name), FaultyCalls()
    os.environ["EDGE_CACHE"] = str(folder / "cache")
    store(1)
    cache.write_timings(HERE, b"measured")
    before = names(sealed.folder())
    faulty.watch(folder, readonly=True)
    assert kept() == 1 and cache.read_timings(HERE) == b"measured"
    for act in (lambda: store(2), sealed.check_writable, lambda: cache.write_timings(HERE, b"m")):
        try:
            act()
        except EngineError as error:
            assert "Read-only file system" in error.message
            assert error.remedy is not None and "EDGE_CACHE=FOLDER" in error.remedy
        else:
            raise AssertionError("written to a disk that cannot be written")
    faulty.rest()
    assert names(sealed.folder()) == before and kept() == 1


def test_a_read_only_cache_is_read_and_refused_for_building(shim: Path, tmp_path: Path) -> None:
    in_child(use_readonly, tmp_path, shim=shim)


def spoil_reading(name: str) -> None:
    folder, faulty = Path(name), FaultyCalls()
    os.environ["EDGE_CACHE"] = str(folder / "cache")
    store(1)

    def read() -> None:
        cache.find("m", HERE, SIZES).close()

    for at, call in enumerate(calls_of(faulty, folder, read)):
        if call == "close":
            continue
        faulty.watch(folder, at, errno.EIO)
        try:
            read()
        except EngineError as error:
            faulty.rest()
            assert "edge build m" in str(error), (at, call, error)
        else:
            raise AssertionError(f"{call} failed and nobody was told")
        assert len(os.listdir("/proc/self/fd")) < 20, "files are left open"
    assert kept() == 1


def test_a_disk_that_cannot_be_read_is_told(shim: Path, tmp_path: Path) -> None:
    in_child(spoil_reading, tmp_path, shim=shim)
