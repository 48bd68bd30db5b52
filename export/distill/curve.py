"""Write the learning curve as a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("step", "stage", "name", "tokens", "seconds", "loss", "gradient", "rate")


def write_curve(file: Path, points: Sequence[Mapping[str, Any]], figures: Sequence[str]) -> None:
    """Write one line per point, either of training (`loss`, the gradient's norm, the learning-rate
    factor) or of a measurement (`valid`, with `figures`).
    """
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, dict.fromkeys((*COLUMNS, *figures)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(points)
