"""Device op of the gated delta rule, with its state in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edge.ops import Op
from edge.plugins.device.text import CONSTANTS, logs, views
from edge.plugins.gated_delta_rule.body import ROWS, STEP
from edge.plugins.gated_delta_rule.statement import GATED_DELTA_RULE
from edge.plugins.selective_scan.body import to_h
from edge.plugins.selective_scan.device import LOGGED, kept_logs, logged_rows, recurrence, scan


def statements() -> Iterator[Op]:
    yield scan(GATED_DELTA_RULE, GATED_DELTA_RULE.maths)


# B of the replayed tokens fills in for their C, which is never used.
_C = """
    C_replayed = Slice(scan_B_rows, axis_0, replay_size, axis_0)
    C_all = Concat<axis=0>(C_replayed, C_own)
"""
_END = """
    flat = Constant<value = int64[3] {0, 0, -1}>()
    y = Reshape(reads, flat)
"""


def body() -> str:
    names = {name: f"{log}_rows" for name, log in LOGGED.items()}
    return (
        CONSTANTS
        + views(("x", "dt", "B", "C"))
        + logged_rows(kept_logs())
        + _C
        + ROWS.format(C="C_all", **names)
        + recurrence(replace(STEP, text=to_h(STEP)), 32)
        + _END
        + logs(kept_logs())
    )
