"""The learning curve as a table that any program reads."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge.export.distill.judge import FIGURES

COLUMNS = ("step", "stage", "name", "tokens", "seconds", "loss", "gradient", "rate", *FIGURES)


def write_curve(file: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """A line a point: of training (`loss`, the gradient's norm, the factor on the learning rate) or
    of measuring (`valid`, with the distance from the teacher).
    """
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(points)
