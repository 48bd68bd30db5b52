"""Resident memory of this process: anonymous, file-backed and shared parts, and the peak."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.runtime.memory import trim

PROC = Path("/proc/self")
_FIELDS = {"anonymous": "RssAnon", "file": "RssFile", "shared": "RssShmem", "peak": "VmHWM"}


@dataclass(frozen=True)
class Resident:
    """Resident bytes now, by kind of backing, and the peak of their sum."""

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
    """Read the `Name: 123 kB` lines of /proc/self/status; None if any is missing."""
    try:
        lines = (proc / "status").read_text().splitlines()
        sizes = {line.partition(":")[0]: line.split()[1:2] for line in lines}
        return Resident(**{field: 1024 * int(sizes[name][0]) for field, name in _FIELDS.items()})
    except (OSError, LookupError, ValueError):
        return None


def restart_peak(proc: Path = PROC) -> bool:
    """Reset VmHWM (proc(5), clear_refs 5). Return False if that is not allowed."""
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def release() -> None:
    """Return unused memory to the system."""
    gc.collect()
    trim()


class Usage:
    """Memory use of one bundle. Create it before loading, then call `loaded` and `used`.

    Attributes:
        program: resident memory before loading: interpreter, libraries, and earlier bundles.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        release()  # memory freed earlier must not hide what this bundle allocates
        self._restarted = restart_peak(proc)
        self.program = resident(proc)
        self._loaded: Resident | None = None
        self._used: Resident | None = None

    def loaded(self) -> None:
        self._loaded = resident(self._proc)

    def used(self) -> None:
        self._used = resident(self._proc)

    def to_dict(self, program: Resident | None = None) -> dict[str, Any] | None:
        """Return the peak and each part after use in bytes, including the program; None if unknown.

        `program`: memory of the program alone, if another bundle was loaded before this one. The
        other bundle is not counted.
        """
        before, used = self.program, self._used
        if before is None or used is None or self._loaded is None:
            return None
        baseline = program or before
        return {
            "peak": baseline.total + max(0, used.peak - before.total),
            "anonymous": baseline.anonymous + max(0, used.anonymous - before.anonymous),
            "file": baseline.file + max(0, used.file - before.file),
            "program": baseline.to_dict(),
            "stages": {
                "before": before.to_dict(),
                "loaded": self._loaded.to_dict(),
                "used": used.to_dict(),
            },
            "peak_restarted": self._restarted,
        }
