"""Pieces of ONNX text shared by several bodies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from string import Template

from edge.launch import RUN_FIELDS
from edge.ops import DOMAIN, Op

CONSTANTS = """
    from_0 = Constant<value = int64 {0}>()
    by_1 = Constant<value = int64 {1}>()
    axis_0 = Constant<value = int64[1] {0}>()
    axis_1 = Constant<value = int64[1] {1}>()
    axis_2 = Constant<value = int64[1] {2}>()
    axis_3 = Constant<value = int64[1] {3}>()
    end = Constant<value = int64[1] {-1}>()
"""

_VIEW = Template("""
    ${name}_start_0 = Constant<value_int: int = @${name}_start>()
    ${name}_width_0 = Constant<value_int: int = @${name}_width>()
    ${name}_from = Reshape(${name}_start_0, end)
    ${name}_count = Reshape(${name}_width_0, end)
    ${name}_to = Add(${name}_from, ${name}_count)
    ${name}_own = Slice($name, ${name}_from, ${name}_to, end)
""")


def views(names: Iterable[str]) -> str:
    """Return nodes that make `{name}_own`, the columns that are read, of each input."""
    return "".join(_VIEW.substitute(name=name) for name in names)


def fields(*names: str) -> str:
    """Return nodes that make int64 scalars of fields of `run`, named in lower case."""
    text = "    run_long = Cast<to=7>(run)\n"
    for name in names:
        at = RUN_FIELDS.index(name.upper())
        text += f"    {name}_at = Constant<value = int64 {{{at}}}>()\n"
        text += f"    {name} = Gather<axis=0>(run_long, {name}_at)\n"
    return text


# log_from [S]: the row of concat(log, new tokens) that each log row gets.
_LOG_ROWS = Template("""
    log_size = Shape<end=1>($log)
    log_count = Squeeze(log_size)
    log_rows = Range(from_0, log_count, by_1)
    log_column = Unsqueeze(log_rows, axis_1)
    slots_long = Cast<to=7>(slots)
    hits = Equal(log_column, slots_long)
    hits_long = Cast<to=7>(hits)
    new_size = Shape<end=1>(slots)
    new_count = Squeeze(new_size)
    new_rows = Range(from_0, new_count, by_1)
    new_numbers = Add(new_rows, by_1)
    hit_numbers = Mul(hits_long, new_numbers)
    numbers = ReduceSum<keepdims=0>(hit_numbers, axis_1)
    is_new = Greater(numbers, from_0)
    beyond = Add(log_count, numbers)
    new_place = Sub(beyond, by_1)
    log_from = Where(is_new, new_place, log_rows)
""")


def logs(values: Mapping[str, str]) -> str:
    """Return nodes that make `{log}_out` of each log: row slots[t] gets the value of token t.

    Tokens with a negative slot are not stored.
    """
    text = _LOG_ROWS.substitute(log=next(iter(values)))
    for log, value in values.items():
        text += f"    {log}_grown = Concat<axis=0>({log}, {value})\n"
        text += f"    {log}_out = Gather<axis=0>({log}_grown, log_from)\n"
    return text


def stored(state: str, new: str) -> str:
    """Return nodes that make `{state}_out`: slot `target` gets `new` [1, …] unless `store` is 0."""
    return f"""
    both = Constant<value = int64[2] {{0, 1}}>()
    behind_both = Constant<value = int64 {{2}}>()
    is_target = Equal(both, target)
    is_stored = Greater(store, from_0)
    is_written = And(is_target, is_stored)
    slot_from = Where(is_written, behind_both, both)
    slots_grown = Concat<axis=0>({state}, {new})
    {state}_out = Gather<axis=0>(slots_grown, slot_from)
"""


def call(
    function: str,
    op: Op,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    domain: str = DOMAIN,
    **attributes: str,
) -> str:
    """Return a node that calls a function of `op`.

    `inputs` and `outputs` map names in the statement to names here, where these differ. Attributes
    have the caller's values, except those in `attributes`.
    """
    assigned = [
        f"{a.name}: {a.kind} = {attributes.get(a.name, f'@{a.name}')}" for a in op.attributes
    ]
    bracketed = f"<{', '.join(assigned)}>" if assigned else ""
    arguments = ", ".join(inputs.get(v.name, v.name) for v in op.inputs)
    results = ", ".join(outputs.get(v.name, v.name) for v in op.outputs)
    return f"    {results} = {domain}.{function}{bracketed}({arguments})\n"


def on_views(name: str, op: Op, seen: Iterable[str]) -> str:
    """Return a body that calls the function `name` on the columns that the attributes select."""
    columns = {input_name: f"{input_name}_own" for input_name in seen}
    return CONSTANTS + views(columns) + call(name, op, columns, {})


def on_rows(op: Op) -> str:
    """Return the body of a norm of the wanted rows; nothing reads its sum."""
    rows = {"x": "x_rows", "added": "added_rows"}
    text = "".join(
        f"    {gathered} = Gather<axis=0>({name}, rows)\n" for name, gathered in rows.items()
    )
    return text + call(op.name, op, rows, {})
