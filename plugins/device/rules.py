"""Derive the statement of a device op from that of an op.

A device op differs from its op in the following:

- A state is updated in place: the input is all of its memory, the output `…_out` the same memory
  after the run. As in the CUDA engine, this is two slots of the state, a log of the inputs of the
  tokens since then, or a KV cache. `run` (`edge.launch.RUN_FIELDS`) and lists of rows select parts.
- An activation may be some columns of a wider tensor: attributes `x_start`, `x_width`.
- Activations are always [T,B,C], indices i32. int8 is signed; packed bytes are i8 with the same
  bits.
- Two ops that are one launch in a step are one op (`edge.plugins.lowering.fuse.Pair`), and a norm
  may pick the wanted rows itself (`…Rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edge.ops import Attribute, Op, Value, index, state

RUN = index("run", "i32[8]", "edge.launch.RUN_FIELDS")
SLOTS = index("slots", "i32[T]", "log row of each new token, -1 for none")
ANCESTORS = index(
    "ancestors",
    "i32[A,A]",
    "A is 1: a chain. A is T: a tree, [t,j] is 1 when j is t or on t's path",
)


def columns(name: str) -> tuple[Attribute, Attribute]:
    """Return the attributes that select columns of an input."""
    return (
        Attribute(f"{name}_start", "int", f"first column of {name} that is read"),
        Attribute(f"{name}_width", "int", "number of columns that are read"),
    )


def narrow(v: Value) -> Value:
    """Return the value with i32 token ids and signed bytes."""
    if v.name == "tokens":
        return replace(v, dtypes=("i32",))
    dtypes = tuple(dict.fromkeys("i8" if dtype == "u8" else dtype for dtype in v.dtypes))
    return replace(v, dtypes=dtypes)


def renamed(v: Value, names: Mapping[str, str], symbols: Mapping[str, str]) -> Value:
    """Return a value with its name, and the symbols of its shape, replaced (`1|N` has symbol N)."""
    shape = tuple(
        "|".join(symbols.get(symbol, symbol) for symbol in dim.split("|")) for dim in v.shape
    )
    return replace(narrow(v), name=names.get(v.name, v.name), shape=shape)


def device(
    op: Op, inputs: tuple[Value, ...], outputs: tuple[Value, ...], maths: str, *, views: bool = True
) -> Op:
    """Return `op` with new inputs and outputs. `views`: values may be columns of wider tensors."""
    inputs, outputs = tuple(map(narrow, inputs)), tuple(map(narrow, outputs))
    names = (v.name for v in inputs if views and v.role == "value" and v.shape[-1] != "1")
    attributes = (*op.attributes, *(attribute for name in names for attribute in columns(name)))
    return replace(op, inputs=inputs, outputs=outputs, attributes=attributes, maths=maths)


def stateless(op: Op, *, views: bool = True) -> Op:
    return device(op, op.inputs, op.outputs, op.maths, views=views)


def of_rows(op: Op) -> Op:
    """Return a norm of the wanted rows only, without the sum as an output."""
    whole = ("T", "B", "D")
    inputs = tuple(replace(v, shape=whole) if v.role == "value" else v for v in op.inputs)
    result = device(
        op,
        (*inputs, index("rows", "i32[L]", "the wanted tokens")),
        (replace(op.outputs[0], shape=("L", "B", "D")),),
        f"{op.maths}\nand of it y[rows] alone",
        views=False,
    )
    return replace(result, name=f"{op.name}Rows")


def after(v: Value) -> Value:
    """Return the output for the memory of a state after the run."""
    return replace(v, name=f"{v.name}_out", doc=f"{v.name} after the run, in place")


def recurrent(op: Op, logs: Mapping[str, str], steering: tuple[Value, ...], maths: str) -> Op:
    """Return the device op for `op`, which has a state of fixed size.

    Logs are in-place memory here, not inputs.

    Args:
        op: the functional op.
        logs: log name → the input whose values it stores.
        steering: index inputs that replace those of `op`.
        maths: definition of the device op.
    """
    values = tuple(
        replace(v, shape=("2", *v.shape), doc="two slots of the state, updated in place")
        if v.role == "state"
        else v
        for v in op.inputs
        if v.role != "index" and not (v.role == "value" and v.name.endswith("_log"))
    )
    by_name = {v.name: v for v in values}
    log_states = tuple(_log(log, by_name[name]) for log, name in logs.items())
    states = tuple(v for v in values if v.role == "state") + log_states
    outputs = (op.outputs[0], *map(after, states))
    return device(op, (*values, *log_states, *steering), outputs, maths)


def _log(name: str, source: Value) -> Value:
    typed = f"{'|'.join(narrow(source).dtypes)}[S,B,{source.shape[-1]}]"
    return state(name, typed, f"log: {source.name} of the tokens since the state")
