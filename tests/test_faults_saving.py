"""An interrupted save (rows 36, 51 and 60 of the fault table): the file is the old state or the new
one, complete; the next save removes what is left beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge import leftovers
from edge.bundle import stamps
from edge.bundle.manifest import FileEntry
from edge.errors import StateError
from edge.replace import clear, replace
from tests.faulty_calls import FaultyCalls, Parent, in_child
from tests.test_bundle import write as write_bundle
from tests.test_faults_disk import calls_of, loaded, names, save, weights_of

KILLS = int(os.environ.get("EDGE_FAULT_KILLS", "300"))
# in processes of their own, so that they spread
GROUPS = 2
WHOLE = {"state", "state~"}


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with Parent() as started:
        yield started


def in_fork(act: Callable[[], None]) -> int:
    """Run `act` in a child process; return the status of `os.waitpid`."""
    child = os.fork()
    if not child:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def test_a_state_is_private_and_a_report_is_not(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        replace(tmp_path / "state", [b"x"])
        replace(tmp_path / "report", [b"x"], mode=0o666)
    finally:
        os.umask(before)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o644


def test_the_next_stamp_removes_what_a_killed_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    monkeypatch.setattr(stamps, "SMALLEST", 0)
    entry = FileEntry(path="weights.bin", size=1, sha256="0" * 64)
    with tempfile.TemporaryFile() as file:
        stamps.remember("fingerprint", entry, file.fileno())
        (stamp,) = (tmp_path / "stamps").iterdir()
        left = stamp.with_name(f"{leftovers.prefix(stamp, 'saving')}0123456789abcdef")
        left.write_bytes(b"half")
        stamps.remember("fingerprint", entry, file.fileno())
        assert [*(tmp_path / "stamps").iterdir()] == [stamp]
        assert stamps.is_known("fingerprint", entry, file.fileno())


# -- kill -9 ---------------------------------------------------------------------------------------


def kill_everywhere(name: str) -> None:
    """Kill before and after each call of a save, and with half of a write written."""
    folder, faulty = Path(name), FaultyCalls()
    file = folder / "state"
    save(file, 0)
    save(file, 1)
    calls = calls_of(faulty, folder, lambda: save(file, 2), short=64)
    assert calls.count("write") > 20
    # the first one keeps the old file as state~
    renamed, left = len(calls) - 1 - calls[::-1].index("rename"), 0
    assert calls.count("rename") == 2
    for at in range(len(calls)):
        for when in (FaultyCalls.KILL_BEFORE, FaultyCalls.KILL_AFTER):
            before = loaded(file)

            def act(at: int = at, when: int = when, before: int = before) -> None:
                faulty.watch(folder, at, when, short=64)
                save(file, before + 1)

            assert in_fork(act) == signal.SIGKILL
            done = at > renamed or (at == renamed and when == FaultyCalls.KILL_AFTER)
            left += len(names(folder) - WHOLE)
            assert len(names(folder) - WHOLE) <= 2
            assert loaded(file) == before + done, (at, calls[at], when)
            assert names(folder) == WHOLE, "what a load leaves"
            assert loaded(folder / "state~") in (before - 2, before - 1, before)
            save(file, before + 2)
            assert names(folder) == WHOLE, (at, calls[at], when)
    assert left > 40, "no kill came while something was being written"


def test_row_36_killed_at_every_call_of_a_save(parent: Parent, tmp_path: Path) -> None:
    parent.in_child(kill_everywhere, tmp_path)


@contextmanager
def in_memory() -> Iterator[Path]:
    """Return a folder on a disk in memory if there is one: a real one syncs thousands of times."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def kill_anywhere(seeds: str) -> None:
    """Kill a process that saves repeatedly, at a random moment; the next one continues."""
    with in_memory() as folder:
        print(kill_in(folder, int(seeds)))


def kill_in(folder: Path, seeds: int) -> int:
    file = folder / "state"
    started = time.monotonic()
    for number in range(20):
        save(file, number)
    one_save = (time.monotonic() - started) / 20
    seen = 0
    for seed in range(seeds):
        before = loaded(file)
        child = os.fork()
        if not child:
            for number in itertools.count(before + 1):
                save(file, number)
        time.sleep(random.Random(seed).uniform(0, 3 * one_save))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        # only the running save leaves something
        assert len(names(folder) - WHOLE) <= 2
        after = loaded(file)
        assert after >= before
        assert loaded(folder / "state~") in (after - 1, after)
        assert names(folder) == WHOLE
        seen += after > before
    save(file, 0)
    assert names(folder) == WHOLE
    return seen


@pytest.mark.parametrize("group", range(GROUPS))
def test_row_36_killed_at_random_moments(group: int) -> None:
    seen = int(in_child(kill_anywhere, KILLS // GROUPS, timeout=3600))
    assert seen > 0, "every kill came before the first save was over"


def test_row_36_what_is_being_saved_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    file = tmp_path / "state"
    begun = tmp_path / f"{leftovers.prefix(file, 'saving')}0123456789abcdef"
    begun.write_bytes(b"half of it")
    other = tmp_path / f"{leftovers.prefix(tmp_path / 'state2', 'saving')}0123456789abcdef"
    other.write_bytes(b"of another file")
    mine = tmp_path / f"{leftovers.prefix(file, 'saving')}plans.txt"
    mine.write_text("no name of ours")
    with begun.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        save(file, 1)
        loaded(file)
        assert begun.exists()
    loaded(file)
    assert not begun.exists() and other.exists() and mine.exists()
    begun.write_bytes(b"again")
    save(file, 2)
    assert not begun.exists() and other.exists() and mine.exists()
    with pytest.raises(StateError):
        loaded(other)


def test_the_file_before_is_kept_although_another_process_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody locks its temporary name: a load in between would remove it."""
    file, rename, swept = tmp_path / "state", os.replace, []

    def late(old: Path, new: Path) -> None:
        if not swept and new.name.endswith("~"):
            swept.append(old)
            clear(file)
        rename(old, new)

    save(file, 1)
    monkeypatch.setattr(os, "replace", late)
    save(file, 2)
    assert swept and loaded(tmp_path / "state~") == 1 and loaded(file) == 2


def test_what_was_saved_is_not_remembered(tmp_path: Path) -> None:
    """A robot that saves every minute accumulates no list of saves."""
    for number in range(9):
        save(tmp_path / "state", number)
    assert len(leftovers.writing) <= 1
    leftovers.writing.clear()


def kill_bundles_everywhere(name: str) -> None:
    """The same for a bundle that replaces another."""
    folder, faulty = Path(name), FaultyCalls()
    target = folder / "b"
    write_bundle(target, b"0")
    calls = calls_of(faulty, folder, lambda: write_bundle(target, b"1"))
    published = calls.index("renameat2")
    last, left = 1, 0
    for at in range(len(calls)):
        for when in (FaultyCalls.KILL_BEFORE, FaultyCalls.KILL_AFTER):

            def act(at: int = at, when: int = when, last: int = last) -> None:
                faulty.watch(folder, at, when)
                write_bundle(target, b"%d" % (last + 1))

            assert in_fork(act) == signal.SIGKILL
            done = at > published or (at == published and when == FaultyCalls.KILL_AFTER)
            assert weights_of(target) == b"%d" % (last + done), (at, calls[at], when)
            left += names(folder) != {"b"}
            last += 2
            write_bundle(target, b"%d" % last)
            assert weights_of(target) == b"%d" % last, (at, calls[at], when)
            assert names(folder) == {"b"}, (at, calls[at], when)
    assert left > 40, "no kill came while something was being written"


def test_row_36_killed_at_every_call_of_writing_a_bundle(parent: Parent) -> None:
    with in_memory() as folder:
        parent.in_child(kill_bundles_everywhere, folder)


# -- loss of power ---------------------------------------------------------------------------------


Entries = dict[str, list[bytes]]  # possible contents of each file


class Disk:
    """The possible contents after a power loss, given only what fsync guarantees.

    Data that was not synced is there in part, as zeros, or not at all; any unsynced change to a
    folder may be missing.
    """

    def __init__(self, old: dict[str, bytes], new: bytes) -> None:
        self.old, self.new = old, new
        self.synced: Entries = {name: [data] for name, data in old.items()}
        self.changes: list[Callable[[Entries], object]] = []
        self.written = 0
        self.data = [b""]  # of the new file, under whatever name

    def happens(self, verb: str, name: str, short: int) -> None:
        """Apply one call of a recorded save, which writes at most `short` bytes at a time."""
        if verb == "create":
            self.changes.append(lambda found: found.update({name: self.data}))
        elif verb == "write":
            self.written = min(self.written + short, len(self.new))
            part = self.new[: self.written]
            self.data[:] = [b"", part[: len(part) // 2], bytes(len(part)), part]
        elif verb == "fsync" and name.startswith("."):
            self.data[:] = [self.new[: self.written]]
        elif verb == "unlink":
            self.changes.append(lambda found: found.pop(name, None))
        elif verb == "linkat":
            self.changes.append(lambda found: found.update({name: [self.old["state"]]}))
        elif verb == "rename":
            self.changes.append(self._rename)
        elif verb == "fsync":  # the folder
            for change in self.changes:
                change(self.synced)
            self.changes.clear()

    def _rename(self, found: Entries) -> None:
        for temporary in [name for name in found if name.startswith(".")]:
            del found[temporary]
        found["state"] = self.data

    def found(self) -> Iterator[dict[str, bytes]]:
        """Return every folder state that may be found."""
        for kept in itertools.product((False, True), repeat=len(self.changes)):
            entries = dict(self.synced)
            for change, keep in zip(self.changes, kept, strict=True):
                if keep:
                    change(entries)
            for choice in itertools.product(*entries.values()):
                yield dict(zip(entries, choice, strict=True))


def record(name: str) -> None:
    folder, faulty = Path(name), FaultyCalls()
    for number in range(2):
        save(folder / "state", number)
    faulty.watch(folder, short=256)
    save(folder / "state", 2)
    print(*faulty.rest(), sep="\n")


def judge(calls: list[str], folder: Path) -> tuple[int, str]:
    """Return the number of outcomes, and what is wrong with the first bad one."""
    files = []
    for number in range(3):
        save(folder / "made", number)
        files.append((folder / "made").read_bytes())
    known = {data: number for number, data in enumerate(files)}
    old = {"state~": files[0], "state": files[1]}
    disk, count = Disk(old, files[2]), 0
    for number, call in enumerate(calls):
        verb, _, name = call.partition(":")
        disk.happens(verb, name, 256)
        for found in disk.found():
            count += 1
            state = known.get(found.get("state", b""))
            if state not in (1, 2):
                return count, "torn"
            if number == len(calls) - 1 and state != 2:
                return count, "lost"
            if "state~" in found and known.get(found["state~"]) not in (0, 1):
                return count, "the one before is torn"
    return count, ""


def test_row_51_every_prefix_and_order_of_writes_after_a_loss_of_power(
    parent: Parent, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    calls = parent.in_child(record, tmp_path / "a").split()
    verbs = [call.partition(":")[0] for call in calls]
    assert verbs.count("write") > 4 and verbs.count("fsync") == 2
    count, wrong = judge(calls, tmp_path)
    assert not wrong and count > 50
    # the check works: it finds the fault where a sync is left out
    first, last = (at for at, verb in enumerate(verbs) if verb == "fsync")
    assert judge(calls[:first] + calls[first + 1 :], tmp_path)[1] == "torn"
    assert judge(calls[:last] + calls[last + 1 :], tmp_path)[1] == "lost"


# -- two at once -----------------------------------------------------------------------------------


def save_often(name: str, first: str, count: str) -> None:
    print("ready", flush=True)
    sys.stdin.read()
    for number in range(int(first), int(first) + int(count)):
        save(Path(name) / "state", number)


def test_row_60_two_processes_save_to_one_path(tmp_path: Path) -> None:
    save(tmp_path / "state", 0)
    command = "import sys; from tests.test_faults_saving import save_often as f; f(*sys.argv[1:])"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", command, str(tmp_path), first, "300"],
            cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for first in ("1000", "2000")
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    seen = set()
    while any(process.poll() is None for process in processes):
        seen.add(loaded(tmp_path / "state"))
    for process in processes:
        assert process.stderr is not None
        assert process.wait() == 0, process.stderr.read().decode()
    assert loaded(tmp_path / "state") in (1299, 2299)
    assert len(seen) > 5, "there was nothing to see"
    assert names(tmp_path) == WHOLE


# -- what a save may replace -----------------------------------------------------------------------


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    """As root a device would be gone; a program that reads a pipe would wait forever."""
    pipe, folder, link = tmp_path / "pipe", tmp_path / "folder", tmp_path / "link"
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to(pipe)
    for place in (pipe, folder, link, Path("/dev/full"), Path("/dev/null")):
        mode = os.lstat(place).st_mode
        with pytest.raises(StateError, match="not a regular file"):
            save(place, 1)
        assert os.lstat(place).st_mode == mode
    assert names(tmp_path) == {"pipe", "folder", "link"} and not names(folder)


def socket_at(place: Path) -> None:
    with contextlib.chdir(place.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(place.name)


PLACES = {"pipe": os.mkfifo, "folder": os.mkdir, "socket": socket_at}


def kept_in_place(make: Callable[[Path], None], write: Callable[[Path], None], at: Path) -> None:
    """Check that saving replaces a link called NAME~ and nothing that is not a file."""
    file, previous = at / "state", at / "state~"
    write(file)
    make(previous)
    mode, before = os.lstat(previous).st_mode, os.stat(file).st_ino
    write(file)
    assert os.lstat(previous).st_mode == mode and os.stat(file).st_ino != before
    assert names(at) == {"state", "state~"}
    previous.rmdir() if previous.is_dir() else previous.unlink()
    (at / "mine").write_text("kept")
    previous.symlink_to("mine")  # the link is replaced, and not what it leads to
    before = os.stat(file).st_ino
    write(file)
    assert os.lstat(previous).st_ino == before and (at / "mine").read_text() == "kept"


@pytest.mark.parametrize("kind", PLACES)
def test_the_file_before_takes_no_place_of_another_kind(kind: str, tmp_path: Path) -> None:
    """Another program may wait at a pipe that happens to be called NAME~."""
    kept_in_place(PLACES[kind], lambda file: save(file, 1), tmp_path)


def test_a_link_is_followed_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "state"
    link.symlink_to("disk/saved")
    for number in (1, 2):
        save(link, number)
        assert link.is_symlink() and loaded(link) == number
    assert loaded(tmp_path / "disk/saved~") == 1
