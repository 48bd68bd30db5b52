"""The learning curve as a table that any program reads."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("step", "stage", "name", "tokens", "seconds", "loss", "gradient", "rate")


def write_curve(file: Path, points: Sequence[Mapping[str, Any]], figures: Sequence[str]) -> None:
    """A line a point: of training (`loss`, the gradient's norm, the factor on the learning rate) or
    of measuring (`valid`, with `figures`).
    """
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, dict.fromkeys((*COLUMNS, *figures)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(points)
