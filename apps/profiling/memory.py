"""Resident memory of this process: anonymous and file-backed apart, and the peak of both."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.runtime.memory import trim

PROC = Path("/proc/self")
_PARTS = {"anonymous": "RssAnon", "file": "RssFile", "shared": "RssShmem"}


@dataclass(frozen=True)
class Resident:
    """Bytes in memory now, by what is behind them, and the most there ever were together."""

    anonymous: int
    file: int
    shared: int
    peak: int

    @property
    def total(self) -> int:
        return self.anonymous + self.file + self.shared

    def to_dict(self) -> dict[str, int]:
        return {
            "anonymous": self.anonymous, "file": self.file, "shared": self.shared,
            "total": self.total,
        }  # fmt: skip


def resident(proc: Path = PROC) -> Resident | None:
    """None where the system does not say."""
    fields = status_fields(proc)
    if not fields.keys() >= {*_PARTS.values(), "VmHWM"}:
        return None
    parts = {name: fields[field] for name, field in _PARTS.items()}
    return Resident(**parts, peak=fields["VmHWM"])


def status_fields(proc: Path = PROC) -> Mapping[str, int]:
    """The `Name: 123 kB` lines of /proc/self/status, as bytes."""
    try:
        lines = (proc / "status").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = 1024 * int(words[0])
    return found


def restart_peak(proc: Path = PROC) -> bool:
    """Let VmHWM begin anew (proc(5), clear_refs 5). False where that is not allowed."""
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def release() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    trim()


class Usage:
    """What one bundle takes. Made before it is loaded, told when it is, and when it has run."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        release()  # what others freed must not hide what this one takes
        self._restarted = restart_peak(proc)
        self._before = resident(proc)
        self._loaded: Resident | None = None
        self._used: Resident | None = None

    def loaded(self) -> None:
        self._loaded = resident(self._proc)

    def used(self) -> None:
        self._used = resident(self._proc)

    @property
    def program(self) -> Resident | None:
        """Resident before loading: the interpreter and its libraries, and bundles before this."""
        return self._before

    def to_dict(self, program: Resident | None = None) -> dict[str, Any] | None:
        """Bytes: the peak, and each part after use, those of the program included; None unknown.

        `program`: what the program alone held, where another bundle was loaded before this one. Of
        that one nothing is counted here.
        """
        before, used = self._before, self._used
        if before is None or used is None or self._loaded is None:
            return None
        alone = program or before
        return {
            "peak": alone.total + max(0, used.peak - before.total),
            "anonymous": alone.anonymous + max(0, used.anonymous - before.anonymous),
            "file": alone.file + max(0, used.file - before.file),
            "program": alone.to_dict(),
            "stages": {
                "before": before.to_dict(),
                "loaded": self._loaded.to_dict(),
                "used": used.to_dict(),
            },
            "peak_restarted": self._restarted,
        }
