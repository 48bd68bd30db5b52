"""Device ops of the scan with its state in place, alone or fused to the product that makes its dt.

One ONNX Scan runs over P + T rows: the log rows that `replay` lists, then the new tokens. Rows of
`replay` from run[PENDING] on leave the state unchanged. The state is carried in fp32 with its
stored values: rounded, and in units of state_scale if it is int8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from string import Template

from edge.ops import DEVICE_DOMAIN, Op, index
from edge.plugins.device.rules import (
    ANCESTORS,
    RUN,
    SLOTS,
    columns,
    recurrent,
    renamed,
    stateless,
)
from edge.plugins.device.text import CONSTANTS, call, fields, logs, stored, views
from edge.plugins.linear.statement import LINEAR, LINEAR_INT8_QUANTIZE
from edge.plugins.selective_scan.body import GROUPED, RATES, SOFTPLUS, STEP, in_groups, to_h
from edge.plugins.selective_scan.recurrence import Step
from edge.plugins.selective_scan.statement import (
    SELECTIVE_SCAN,
    SELECTIVE_SCAN_GROUPS,
    SELECTIVE_SCAN_GROUPS_INT8,
    SELECTIVE_SCAN_INT8,
)

# inputs that replays need → their logs
LOGGED = {"x": "scan_x", "dt": "scan_dt", "B": "scan_B"}
# names in the fused op of the inputs of the product that makes dt
DT_NAMES = {
    "x": "low_dt",
    "x_scale": "low_dt_scale",
    "weight": "dt_weight",
    "weight_scale": "dt_weight_scale",
    "y_scale": "dt_scale",
}


def scan(op: Op, maths: str) -> Op:
    """Return the statement of a scan with its state in place."""
    return recurrent(
        op,
        {log: name for name, log in LOGGED.items()},
        (
            RUN,
            index("replay", "i32[P]", "log rows, oldest first: run[PENDING] of them; P ≥ 1"),
            SLOTS,
            ANCESTORS,
        ),
        f"{maths}\nwhere the state before the run is ssm_state[run[SOURCE]] and then, one after "
        "the other, the tokens at rows replay[:run[PENDING]] of the logs. "
        "ssm_state_out[run[TARGET]] is, by run[STORE], 0: as it was, 1: the state after the first "
        "run[ADVANCE] ≥ 1 of these, 2: the one after the run. scan_x_out[slots[t]] = x[t], where "
        "slots[t] ≥ 0; dt and B likewise. The ONNX function takes every run for a chain",
    )


# products that make a dt, and the scans after them
_SCANS = (
    (LINEAR, SELECTIVE_SCAN),
    (LINEAR, SELECTIVE_SCAN_GROUPS),
    (LINEAR_INT8_QUANTIZE, SELECTIVE_SCAN_INT8),
    (LINEAR_INT8_QUANTIZE, SELECTIVE_SCAN_GROUPS_INT8),
)


def statements() -> Iterator[Op]:
    for product, op in _SCANS:
        standalone = scan(op, op.maths)
        yield standalone
        yield _with_dt(standalone, product)


def _with_dt(op: Op, product: Op) -> Op:
    """Return the fusion of a scan with the product that makes its dt."""
    symbols = {"O": "E", "N": "E", "I": "R", "K": "R"}
    existing = {v.name for v in op.inputs}
    dt_inputs = tuple(
        renamed(v, DT_NAMES, symbols) for v in product.inputs if DT_NAMES[v.name] not in existing
    )
    scan_inputs = tuple(v for v in op.inputs if v.name != "dt")
    attributes = tuple(a for a in op.attributes if a not in columns("dt"))
    y_scale = ", dt_scale" if len(dt_inputs) > 2 else ""
    return replace(
        op,
        name=f"{op.name}Dt",
        tail="Dt",
        inputs=(*scan_inputs, *dt_inputs),
        attributes=(*attributes, *columns("low_dt")),
        maths=f"dt = {product.name}({', '.join(v.name for v in dt_inputs)}{y_scale})\n{op.maths}",
        source=f"{product.name}, then {op.name}",
    )


# -- bodies ----------------------------------------------------------------------------------------

_CAST = {32: 1, 16: 10, 8: 3}

# Nodes that make `rounded`, the stored values of a token's state `h`, in fp32.
_KEEP = {
    32: "rounded = Identity(h)",
    16: """half_h = Cast<to=10>(h)
        rounded = Cast<to=1>(half_h)""",
    8: """nearest = Round(h)
        lowest = Constant<value = float {-128.0}>()
        highest = Constant<value = float {127.0}>()
        rounded = Clip(nearest, lowest, highest)""",
}

_ROWS = """
    replay_size = Shape<end=1>(replay)
    replay_count = Squeeze(replay_size)
    fed_size = Shape<end=1>(slots)
    fed_count = Squeeze(fed_size)
    row_count = Add(replay_count, fed_count)
    order = Range(from_0, row_count, by_1)
    is_pending = Less(order, pending)
    is_fed = GreaterOrEqual(order, replay_count)
    is_live = Or(is_pending, is_fed)
    ordinal = Add(order, by_1)
    ends_here = Equal(ordinal, advance)
    is_replayed = Less(order, replay_count)
    is_saved = And(ends_here, is_replayed)
    replay_order = Range(from_0, replay_count, by_1)
    is_named = Less(replay_order, pending)
    replay_long = Cast<to=7>(replay)
    replay_rows = Where(is_named, replay_long, from_0)
"""


def logged_rows(values: Mapping[str, str]) -> str:
    """Return nodes that make `{log}_rows` [P + T, B, ·]: its replayed rows, then the new value."""
    text = fields("pending", "advance", "source", "target", "store") + _ROWS
    for log, value in values.items():
        text += f"    {log}_replayed = Gather<axis=0>({log}, replay_rows)\n"
        text += f"    {log}_rows = Concat<axis=0>({log}_replayed, {value})\n"
    return text


_RECURRENCE = Template("""
    state_slot = Gather<axis=0>(ssm_state, source)
    state_before = Cast<to=1>(state_slot)
    state_last, state_saved, all_reads = Scan<num_scan_inputs=$count,
      body = token (float[$state] before, float[$state] saved_before, bool live_t, bool saved_t,
                    $token)
          => (float[$state] after, float[$state] saved, float[$read] read_t) {$step
        $keep
        after = Where(live_t, rounded, before)
        saved = Where(saved_t, after, saved_before)
      }>(state_before, state_before, is_live, is_saved, $rows)
    reads = Slice(all_reads, replay_size, row_end, axis_0)
    store_saved = Equal(store, by_1)
    state_new = Where(store_saved, state_saved, state_last)
    state_narrow = Cast<to=$cast>(state_new)
    state_kept = Unsqueeze(state_narrow, axis_0)
""")


def recurrence(step: Step, state_bits: int) -> str:
    """Return nodes that make `reads` [T, …] of the new tokens, and ssm_state_out, by `step`.

    The step makes `h`.
    """
    return (
        "    row_end = Constant<value = int64[1] {9223372036854775807}>()\n"
        + _RECURRENCE.substitute(
            count=len(step.rows) + 2,
            state=step.state,
            read=step.read,
            token=", ".join(f"float[{shape}] {name}_t" for name, shape in step.rows.items()),
            rows=", ".join(step.rows),
            step=step.text.format(before="before", **{n: f"{n}_t" for n in step.rows}),
            keep=_KEEP[state_bits],
            cast=_CAST[state_bits],
        )
        + stored("ssm_state", "state_kept")
    )


def _widened(name: str, scale: str | None, output: str) -> str:
    """Return nodes that make `output`, `name` in fp32."""
    if scale is None:
        return f"    {output} = Identity({name})\n"
    return f"    {output}_steps = Cast<to=1>({name})\n    {output} = Mul({output}_steps, {scale})\n"


def start(values: tuple[str, ...], int8: bool, scales: Mapping[str, str]) -> str:
    """Return the nodes a scan starts with.

    They make, in fp32, `{x}_new` of the new tokens, `{x}_all` [P + T] of logged values, and
    `{D}_wide` of constants. `scales` replace the scales of activations.
    """
    text = CONSTANTS + views(values) + logged_rows(kept_logs())
    for name in values:
        scale = scales.get(name, f"{name}_scale") if int8 else None
        text += _widened(f"{name}_own", scale, f"{name}_new")
        if name in LOGGED:
            text += _widened(f"{LOGGED[name]}_rows", scale, f"{name}_all")
    if not int8:
        return text + "    D_wide = Identity(D)\n    dt_bias_wide = Identity(dt_bias)\n"
    for name in ("A_log", "D", "dt_bias"):
        text += f"    {name}_wide = DequantizeLinear<axis=-1>({name}, {name}_scale)\n"
    return text + RATES


def kept_logs() -> dict[str, str]:
    """Return log → the value of the new tokens that it stores."""
    return {log: f"{name}_own" for name, log in LOGGED.items()}


# C of the replayed tokens is never used: B fills in for it, or zeros if their widths differ.
_ONE = """
    C_replayed = Slice(B_all, axis_0, replay_size, axis_0)
    C_all = Concat<axis=0>(C_replayed, C_new)
    B4 = Unsqueeze(B_all, axis_3)
    C4 = Unsqueeze(C_all, axis_2)
"""
_MANY = """
    C_row = Shape<start=1>(C_new)
    C_size = Concat<axis=0>(replay_size, C_row)
    C_replayed = ConstantOfShape(C_size)
    C_all = Concat<axis=0>(C_replayed, C_new)
"""
_SCAN = Template("""
    $rows
    shifted = Add(dt_all, dt_bias_wide)
    $softplus
    scaled = Mul(positive, x_all)
    delta4 = Unsqueeze(positive, axis_2)
    scaled4 = Unsqueeze(scaled, axis_2)
    $recurrence
    read = Squeeze(reads, axis_2)
    skip = Mul(x_new, D_wide)
    ungated = Add(read, skip)
    open = Sigmoid(z_new)
    gate = Mul(z_new, open)
    y = Mul(ungated, gate)
""")
_STATE_STEPS = """
    state_steps = Reshape(state_scale, end)
    B_steps = Div(B_scale, state_steps)
    C_steps = Mul(C_scale, state_steps)
"""


def body(op: str, state_bits: int = 32) -> str:
    """Return the body of a scan, alone or fused to its product."""
    for product, scan_op in _SCANS:
        if op == f"{scan_op.name}Dt":
            return _fused_body(product, scan_op, state_bits)
    return _scan("Groups" in op, "Int8" in op, state_bits)


def _scan(grouped: bool, int8: bool, state_bits: int) -> str:
    """Return the body of a scan alone. For an int8 state, B and C are scaled to its steps."""
    in_steps = state_bits == 8 and not grouped
    scales = {"B": "B_steps", "C": "C_steps"} if in_steps else {}
    step = GROUPED if grouped else STEP
    rows = _MANY + in_groups("B_all", "C_all", state_bits) if grouped else _ONE
    steps = recurrence(replace(step, text=to_h(step)), state_bits)
    text = start(("x", "dt", "B", "C", "z"), int8, scales)
    if scales:
        text = text.replace(CONSTANTS, CONSTANTS + _STATE_STEPS, 1)
    return (
        text + _SCAN.substitute(softplus=SOFTPLUS, rows=rows, recurrence=steps) + logs(kept_logs())
    )


def _fused_body(product: Op, op: Op, state_bits: int) -> str:
    """Return the body of a scan fused to its product; dt is as wide as x."""
    low_dt_columns = {"x_start": "@low_dt_start", "x_width": "@low_dt_width"}
    product_call = call(
        product.name, stateless(product), DT_NAMES, {"y": "dt"}, DEVICE_DOMAIN, **low_dt_columns
    )
    standalone = scan(op, op.maths)
    return product_call + call(
        op.function({"state_bits": state_bits}),
        standalone,
        {},
        {},
        DEVICE_DOMAIN,
        dt_start="0",
        dt_width="@x_width",
    )
