"""Disk faults during a save or an export (rows 37 to 39 of the fault table): a typed error, the old
file or folder intact, nothing half-written beside it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edge.bundle import open_bundle, stamps
from edge.errors import BundleError, EdgeError, ExportError, StateError
from edge.runtime import statefile
from edge.runtime.layout import Identity, StateLayout
from tests.faulty_calls import FaultyCalls, Parent
from tests.test_bundle import write as write_bundle

IDENTITY, LAYOUT = Identity("model"), StateLayout({"s": (8, 8)}, {}, 1, 0)
PROBLEMS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with Parent() as started:
        yield started


def save(file: Path, number: int) -> None:
    tensors = {"s": np.full((8, 8), number, np.float32)}
    statefile.write(file, IDENTITY, LAYOUT, number, tensors, {"padding": "x" * 1000})


def loaded(file: Path) -> int:
    """Return the saved number, after checking the whole file."""
    saved = statefile.read(file, IDENTITY, LAYOUT)
    assert (saved.tensors["s"] == saved.position).all()
    return saved.position


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def calls_of(faulty: FaultyCalls, folder: Path, act: Callable[[], object], **how: int) -> list[str]:
    faulty.watch(folder, **how)  # type: ignore[arg-type]
    try:
        act()
    finally:
        calls = faulty.rest()
    return [call.partition(":")[0] for call in calls]


# -- state files -----------------------------------------------------------------------------------


def spoil_saves(name: str) -> None:
    """Fail every call of a save with every errno; once, and permanently."""
    folder, faulty = Path(name), FaultyCalls()
    file = folder / "state"
    save(file, 0)
    save(file, 1)
    short = {"short": 300}
    calls = calls_of(faulty, folder, lambda: save(file, 2), **short)
    assert calls.count("write") > 3
    assert {"create", "fsync", "unlink", "linkat", "rename", "close", "open"} <= set(calls)
    for at in range(len(calls)):
        for problem in PROBLEMS:
            for sticky in (False, True):
                spoil_save(faulty, file, at, problem, sticky, calls)


def spoil_save(
    faulty: FaultyCalls, file: Path, at: int, problem: int, sticky: bool, calls: list[str]
) -> None:
    before = loaded(file)
    case = (at, calls[at], problem, sticky)
    # the rename before it keeps the previous file
    last = len(calls) - 1 - calls[::-1].index("rename")
    faulty.watch(file.parent, at, problem, short=300, sticky=sticky)
    try:
        save(file, before + 1)
    except StateError as error:
        faulty.rest()
        assert os.strerror(problem) in str(error) and str(file) in str(error), case
        # the folder's own fsync and its close come after the new one is in place
        assert loaded(file) == before + (at > last), case
    else:
        faulty.rest()
        assert loaded(file) == before + 1, case
        # only the calls that keep the previous file may fail without an error
        assert not sticky and calls[at] in ("unlink", "linkat", "rename") and at != last, case
    left = names(file.parent) - {"state", "state~"}
    assert not left or sticky, case  # a broken disk does not remove files either
    save(file, before + 2)
    assert names(file.parent) == {"state", "state~"}, case
    assert loaded(file) == before + 2, case
    assert loaded(file.with_name("state~")) in (before, before + 1), case


def test_row_37_every_call_of_a_save_refused(parent: Parent, tmp_path: Path) -> None:
    parent.in_child(spoil_saves, tmp_path)


def shorten_saves(name: str) -> None:
    folder, faulty = Path(name), FaultyCalls()
    save(folder / "state", 1)
    whole = (folder / "state").read_bytes()
    for short in (1, 2, 3, 7, 100, len(whole) - 1):
        writes = calls_of(faulty, folder, lambda: save(folder / "state", 1), short=short)
        assert writes.count("write") >= len(whole) // short
        assert (folder / "state").read_bytes() == whole


def test_row_37_writes_that_take_less_than_they_are_given(parent: Parent, tmp_path: Path) -> None:
    parent.in_child(shorten_saves, tmp_path)


def fail_fsync(name: str) -> None:
    """No success is claimed, and fsync is never retried."""
    folder, faulty = Path(name), FaultyCalls()
    file = folder / "state"
    save(file, 1)
    calls = calls_of(faulty, folder, lambda: save(file, 2))
    for at in (at for at, call in enumerate(calls) if call == "fsync"):
        before = loaded(file)
        faulty.watch(folder, at, errno.EIO)
        try:
            save(file, before + 1)
        except StateError as error:
            after = [call.partition(":")[0] for call in faulty.rest()][at + 1 :]
            assert "fsync" not in after and "Input/output" in str(error)
        else:
            raise AssertionError("a save that was not synced passed for one")
        if at < calls.index("rename"):
            assert loaded(file) == before and names(folder) == {"state", "state~"}
        save(file, before + 5)
    assert calls.count("fsync") == 2


def test_row_38_a_failed_fsync_is_no_success(parent: Parent, tmp_path: Path) -> None:
    parent.in_child(fail_fsync, tmp_path)


# -- bundles ---------------------------------------------------------------------------------------


def weights_of(bundle: Path) -> bytes:
    with open_bundle(bundle) as opened:
        opened.verify()
        return opened.read("weights.bin")


def spoil_bundles(name: str, first: str) -> None:
    """Fail every call of writing a bundle, with and without an existing one."""
    folder, faulty = Path(name), FaultyCalls()
    target = folder / "b"
    if not int(first):
        write_bundle(target, b"0")
    calls = calls_of(faulty, folder, lambda: write_bundle(target, b"1"))
    published = max(at for at, call in enumerate(calls) if call.startswith("rename"))
    write_bundle(target, b"0")
    for at in range(len(calls)):
        for problem in PROBLEMS[:2]:
            number = b"%d" % (2 + at)
            if int(first):
                shutil.rmtree(target)
            faulty.watch(folder, at, problem)
            try:
                write_bundle(target, number)
            except ExportError as error:
                faulty.rest()
                assert os.strerror(problem) in str(error), (at, calls[at])
                if at <= published:
                    assert not target.exists() if int(first) else weights_of(target) == b"0"
            else:
                faulty.rest()
                # an existing folder, then an exchange in two steps, and the remains of the old
                # bundle
                assert at >= published or calls[at] == "mkdir", (at, calls[at])
                assert weights_of(target) == number
            write_bundle(target, b"0")
            assert names(folder) == {"b"}, (at, calls[at])
            assert weights_of(target) == b"0"


@pytest.mark.parametrize("first", [True, False])
def test_row_37_every_call_of_writing_a_bundle_refused(
    parent: Parent, tmp_path: Path, first: bool
) -> None:
    parent.in_child(spoil_bundles, tmp_path, int(first))


def fill_disk_while_exporting(name: str, source: str) -> None:
    """The disk is full from some call of a real export on."""
    from edge.export.exporter import export_checkpoint

    folder, faulty = Path(name), FaultyCalls()

    def export() -> None:
        export_checkpoint(source, folder / "b", quant="w8", verify=False)

    calls = calls_of(faulty, folder, export)
    before = weights_of(folder / "b")
    for at in range(0, len(calls) - 12, len(calls) // 11):
        faulty.watch(folder, at, errno.ENOSPC)
        try:
            export()
        except ExportError as error:
            faulty.rest()
            assert "No space left" in str(error), (at, calls[at])
        else:
            faulty.rest()
            assert calls[at] == "mkdir", f"{calls[at]} failed and the export did not"  # it exists
        assert names(folder) == {"b"} and weights_of(folder / "b") == before


def test_row_37_a_full_disk_while_exporting(parent: Parent, tmp_path: Path) -> None:
    from tests.transformers_checkpoints import save_mamba2  # which children need not import

    source = save_mamba2(tmp_path / "source")
    (tmp_path / "out").mkdir()
    parent.in_child(fill_disk_while_exporting, tmp_path / "out", source)


def spoil_reading(name: str) -> None:
    folder, faulty = Path(name), FaultyCalls()
    write_bundle(folder / "b")
    save(folder / "state", 1)
    for read, kind in (
        (lambda: weights_of(folder / "b"), BundleError),
        (lambda: loaded(folder / "state"), StateError),
    ):
        calls = calls_of(faulty, folder, read)
        for at, call in enumerate(calls):
            if call == "close":
                continue
            faulty.watch(folder, at, errno.EIO)
            try:
                read()
            except kind as error:
                faulty.rest()
                assert "Input/output error" in str(error), call
            else:
                raise AssertionError(f"{call} failed and nobody was told")
            assert len(os.listdir("/proc/self/fd")) < 20, "files are left open"
        read()


def test_row_37_a_disk_that_cannot_be_read(parent: Parent, tmp_path: Path) -> None:
    parent.in_child(spoil_reading, tmp_path)


# -- read-only -------------------------------------------------------------------------------------


def use_readonly(name: str) -> None:
    """A bundle, its cache and a home that cannot be written."""
    folder, faulty = Path(name), FaultyCalls()
    stamps.SMALLEST = 1
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    write_bundle(folder / "b")
    save(folder / "state", 1)
    faulty.watch(folder, readonly=True)
    for _ in range(2):
        assert weights_of(folder / "b") == b"w" * 1000
    assert loaded(folder / "state") == 1
    for act in (lambda: save(folder / "state", 2), lambda: write_bundle(folder / "b", b"2")):
        try:
            act()
        except EdgeError as error:
            assert "Read-only file system" in str(error)
        else:
            raise AssertionError("written to a disk that cannot be written")
    refused = [call for call in faulty.rest() if not call.startswith(("open", "pread", "read"))]
    assert any(call in ("mkdir:stamps", "mkdir:cache") for call in refused)
    assert names(folder) == {"b", "state"}


def test_row_39_a_read_only_disk_costs_the_cache_alone(
    parent: Parent, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert parent.in_child(use_readonly, tmp_path) == ""
    assert capfd.readouterr().err == ""


def answer_readonly(name: str) -> None:
    """Check the whole runtime from a read-only disk and home, on a machine in use."""
    import edge

    folder, faulty = Path(name), FaultyCalls()
    home = folder / "home"
    os.environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    faulty.watch(folder, readonly=True)
    for _ in range(2):
        session = edge.load(folder / "b", threads=1).session()
        print(session.generate("one", temperature=0, max_tokens=3).finish().tokens)
    faulty.rest()


def test_row_39_answers_from_a_read_only_disk(parent: Parent, tmp_path: Path) -> None:
    from tests.session_models import bundle, model

    shutil.copytree(bundle("bytes"), tmp_path / "b")
    answer = model("bytes").session().generate("one", temperature=0, max_tokens=3).finish()
    assert parent.in_child(answer_readonly, tmp_path) == f"{answer.tokens}\n" * 2
