"""Boards that are known by name, and how much of their memory is left for a program."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge.errors import InputError

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of the machine that a model is to run on.

    Attributes:
        name: name of the machine, for people.
        available: bytes free for the program; None if unknown.
        basis: where `available` comes from.
    """

    name: str
    available: int | None
    basis: str


@dataclass(frozen=True)
class _BoardKind:
    """Memory that the system keeps: `fixed` GiB and a `share` of it. Assumed, never measured."""

    what: str
    fixed: float
    share: float
    why: str

    def left(self, size: int) -> int:
        return int((size * (1 - self.share) - self.fixed) * GIB)


# CPU and GPU share one pool. Linux shows about 7.6 GiB of an 8 GB module (firmware carve-outs take
# the rest), and published figures for a headless system and its services are 1.5 to 2 GB.
_JETSON = _BoardKind(
    "Jetson", 1.5, 0.05, "assumed: firmware and a headless system keep 1.5 GiB + 5 %"
)
_GPU = _BoardKind("GPU", 0.5, 0.05, "assumed: the driver and a context keep 0.5 GiB + 5 %")

# Nominal sizes in GiB, from the vendors' product pages.
_BOARDS = {
    "orin-nano-4gb": (_JETSON, 4),
    "orin-nano-8gb": (_JETSON, 8),
    "orin-nx-8gb": (_JETSON, 8),
    "orin-nx-16gb": (_JETSON, 16),
    "agx-orin-32gb": (_JETSON, 32),
    "agx-orin-64gb": (_JETSON, 64),
    "agx-thor-128gb": (_JETSON, 128),
    "rtx-4060-8gb": (_GPU, 8),
    "rtx-4070-12gb": (_GPU, 12),
    "rtx-4090-24gb": (_GPU, 24),
    "rtx-5090-32gb": (_GPU, 32),
    "l4-24gb": (_GPU, 24),
    "a100-80gb": (_GPU, 80),
    "h100-80gb": (_GPU, 80),
    "h200-141gb": (_GPU, 141),
}
BOARDS = tuple(_BOARDS)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": GIB}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmg]i?|)b?", re.ASCII | re.IGNORECASE)


def board(name: str) -> MemoryBudget:
    """Return the budget of the board called `name`. Raises InputError."""
    found = _BOARDS.get(name.lower())
    if found is None:
        raise InputError(
            f"unknown board {name!r:.40}",
            field="--board",
            remedy=f"choose {', '.join(BOARDS)}; or give the free memory: --memory 4GB",
        )
    kind, size = found
    basis = f"{size} GiB, of which {kind.why}"
    if kind is _GPU:
        basis += "; the plan is for the CPU engine, there is none for a GPU yet"
    return MemoryBudget(name.lower(), kind.left(size), basis)


def sized(text: str) -> MemoryBudget:
    """Return a budget of this much free memory: `4GB`, `512MiB`, `3.5G`. Raises InputError."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < 10**6:  # a number without a unit counts bytes
        raise InputError(
            f"{text!r:.40} is not a memory size",
            field="--memory",
            remedy="such as 4GB, 512MiB or 3.5G",
        )
    return MemoryBudget(f"{text.strip()} of memory", size, "as given, all of it free")
