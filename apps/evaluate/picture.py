"""The sensitivity table as an SVG: one bar a row, KL divergence on a logarithmic axis.

Written by hand: no library, and the same bytes for the same figures everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

COLOURS = {"weight": "#4477aa", "activation": "#cc6677", "state": "#ddcc77", "all": "#777777"}
_LABEL, _PLOT, _FIGURE = 290, 420, 110  # widths of the columns
_ROW, _TOP, _BOTTOM = 20, 56, 40
_FLOOR = 1e-9  # below this, fp32 says nothing


def draw(facts: Mapping[str, Any]) -> str:
    """What `edge eval --sensitivity --json` gives, in its order."""
    title = f"{facts['quantization']}: what each rounding costs alone"
    rows: Sequence[Mapping[str, Any]] = facts["sensitivity"]
    values = [max(float(row["kl_nats_per_token"]), _FLOOR) for row in rows]
    low = math.floor(math.log10(min(values)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    width, height = _LABEL + _PLOT + _FIGURE, _TOP + _ROW * len(rows) + _BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
        *_legend(),
        *_axis(low, high, height),
    ]
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        y = _TOP + _ROW * index
        length = _PLOT * (math.log10(value) - low) / (high - low)
        out += [
            f'<text x="{_LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(row["name"])}</text>',
            f'<rect x="{_LABEL}" y="{y + 3}" width="{length:.1f}" height="{_ROW - 6}" '
            f'fill="{COLOURS[row["kind"]]}"/>',
            f'<text x="{_LABEL + length + 6:.1f}" y="{y + 14}">{value:.1e}</text>',
        ]
    return "\n".join([*out, "</svg>", ""])


def _legend() -> list[str]:
    out, x = [], 10
    for kind, colour in COLOURS.items():
        out += [
            f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>',
            f'<text x="{x + 16}" y="42">{kind}</text>',
        ]
        x += 90
    return out


def _axis(low: int, high: int, height: int) -> list[str]:
    out, end = [], height - _BOTTOM
    for power in range(low, high + 1):
        x = _LABEL + _PLOT * (power - low) / (high - low)
        out += [
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{end}" stroke="#dddddd"/>',
            f'<text x="{x:.1f}" y="{end + 14}" text-anchor="middle">1e{power}</text>',
        ]
    out.append(
        f'<text x="{_LABEL + _PLOT / 2}" y="{end + 32}" text-anchor="middle">'
        "KL divergence from the floating model, nats a token</text>"
    )
    return out
