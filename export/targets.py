"""Names that `--target` accepts: GPU architectures, and the boards and cards that have them."""

from __future__ import annotations

from collections.abc import Iterable

from edge.errors import InputError
from edge.launch import ARCHITECTURES

CPU = "cpu"
# NVIDIA's list of compute capabilities (developer.nvidia.com/cuda-gpus)
_BOARDS: dict[int, tuple[str, ...]] = {
    75: ("t4", "rtx-2080"),
    80: ("a100", "a30"),
    86: ("a10", "rtx-3060", "rtx-3090"),
    87: ("orin-nano", "orin-nx", "agx-orin"),
    89: ("l4", "l40s", "rtx-4060", "rtx-4070", "rtx-4090"),
    90: ("h100", "h200"),
    100: ("b200",),
    120: ("rtx-5070", "rtx-5090"),
}
NAMES: dict[str, int] = {f"sm_{sm}": sm for sm in ARCHITECTURES} | {
    board: sm for sm, boards in _BOARDS.items() for board in boards
}


def architectures(targets: Iterable[str]) -> tuple[int, ...]:
    """Return the distinct architectures: `["cpu,sm_87", "l4"]` → (87, 89).

    `cpu` adds nothing: every bundle runs on it. Raises InputError for an unknown name and lists
    the known ones.
    """
    found = set()
    for name in (part.strip().lower() for text in targets for part in text.split(",")):
        if name == CPU:
            continue
        if name not in NAMES:
            raise InputError(
                f"unknown target {name!r}", field="--target", remedy=f"choose from: {describe()}"
            )
        found.add(NAMES[name])
    return tuple(sorted(found))


def describe() -> str:
    """Return every target on one line, each with the boards that have it."""
    return "; ".join(
        [CPU, *(f"sm_{sm} ({', '.join(_BOARDS[sm])})" for sm in ARCHITECTURES if sm in _BOARDS)]
    )
