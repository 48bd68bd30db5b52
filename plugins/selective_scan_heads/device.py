"""Device ops of Mamba-2's scan with its state in place, always token by token."""

from __future__ import annotations

from collections.abc import Iterator
from string import Template

from edge.ops import Op
from edge.plugins.device.text import logs
from edge.plugins.selective_scan.body import SOFTPLUS
from edge.plugins.selective_scan.device import kept_logs, recurrence, scan, start
from edge.plugins.selective_scan.recurrence import Step
from edge.plugins.selective_scan_heads.statement import (
    LOGGED,
    SELECTIVE_SCAN_HEADS,
    SELECTIVE_SCAN_HEADS_INT8,
)


def statements() -> Iterator[Op]:
    """Yield the scans. Logs are in-place memory here, not inputs."""
    for op in (SELECTIVE_SCAN_HEADS, SELECTIVE_SCAN_HEADS_INT8):
        yield scan(op, op.maths.removeprefix(LOGGED))


_STEP = Step(
    """
        faded = Mul({before}, {decay5})
        fed = Mul({scaled5}, {B5})
        h = Add(faded, fed)
        read_t = MatMul(h, {C5})""",
    {"decay5": "B,H,1,1", "scaled5": "B,H,P,1", "B5": "B,G,1,N", "C5": "B,G,N,1"},
    state="B,H,P,N",
    read="B,H,P,1",
)

# B of the replayed tokens fills in for their C, which is never used.
_HEADS = Template("""
    heads_0 = Constant<value_int: int = @heads>()
    heads_1 = Reshape(heads_0, end)
    groups_0 = Constant<value_int: int = @groups>()
    groups_1 = Reshape(groups_0, end)
    stay_2 = Constant<value = int64[2] {0, 0}>()
    head_shape = Concat<axis=0>(stay_2, heads_1, end)
    group_shape = Concat<axis=0>(stay_2, groups_1, end)
    C_replayed = Slice(B_all, axis_0, replay_size, axis_0)
    C_all = Concat<axis=0>(C_replayed, C_new)
    shifted = Add(dt_all, dt_bias_wide)
    $softplus
    low = Constant<value_float: float = @dt_min>()
    high = Constant<value_float: float = @dt_max>()
    delta = Clip(positive, low, high)
    rate = Mul(delta, A)
    decay = Exp(rate)
    last_two = Constant<value = int64[2] {3, 4}>()
    decay5 = Unsqueeze(decay, last_two)
    x4 = Reshape(x_all, head_shape)
    delta4 = Unsqueeze(delta, end)
    scaled = Mul(x4, delta4)
    scaled5 = Unsqueeze(scaled, end)
    B4 = Reshape(B_all, group_shape)
    C4 = Reshape(C_all, group_shape)
    $by_head
    $columns
    $recurrence
    read = Squeeze(reads, end)
    x_heads = Reshape(x_new, head_shape)
    D_column = Unsqueeze(D_wide, end)
    skip = Mul(x_heads, D_column)
    y_heads = Add(read, skip)
    flat = Constant<value = int64[3] {0, 0, -1}>()
    y = Reshape(y_heads, flat)
""")

# With several groups, each head gets its group's B and C. Those of a single group broadcast.
_SEVERAL = """
    head = Range(from_0, heads_0, by_1)
    share = Div(heads_0, groups_0)
    group = Div(head, share)
    B_heads = Gather<axis=2>(B4, group)
    C_heads = Gather<axis=2>(C4, group)
"""
_ONE = """
    B_heads = Identity(B4)
    C_heads = Identity(C4)
"""
_COLUMNS = """
    B5 = Unsqueeze(B_heads, axis_3)
    C5 = Unsqueeze(C_heads, end)
"""
# An int8 state is in units of its scale, which may be one per head and column.
_COLUMNS_OF_STEPS = """
    B_row = Unsqueeze(B_heads, axis_3)
    B5 = Div(B_row, state_scale)
    C_row = Unsqueeze(C_heads, axis_3)
    C_steps = Mul(C_row, state_scale)
    C5 = Transpose<perm=[0, 1, 2, 4, 3]>(C_steps)
"""


def body(op: str, groups: int | None, state_bits: int = 32) -> str:
    return (
        start(("x", "dt", "B", "C"), "Int8" in op, {})
        + _HEADS.substitute(
            softplus=SOFTPLUS,
            by_head=_ONE if groups == 1 else _SEVERAL,
            columns=_COLUMNS_OF_STEPS if state_bits == 8 else _COLUMNS,
            recurrence=recurrence(_STEP, state_bits),
        )
        + logs(kept_logs())
    )
