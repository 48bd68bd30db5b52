"""The ops as a GPU runs them: nodes of the device graph, `graphs/tensorrt.onnx`.

A device op is an op of `edge.ops` but for this:

- A state stays where it is: all of its memory goes in, an output `…_out` is the same memory after
  the run. The memory is that of the CUDA engine: two slots of the state, a log of what the tokens
  since then put in, or a KV cache; `run` (`edge.launch.RUN_FIELDS`) and lists of rows steer.
- An activation may be some columns of a wider tensor: attributes `x_start`, `x_width`.
- Activations are [T,B,C] everywhere, indices i32. int8 is signed; packed bytes are i8, the same
  bits.
- Two ops that are one launch in a step are one op (the names and the order of inputs are those of
  `edge.plugins.lowering.fuse`), and a norm may pick the wanted rows itself (`…Rows`).

The statements are derived from those of `edge.ops`. `DEVICE_OPS` has them by function name, one
for each variant of a body (`edge.ops.variants`): `device_name` finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edge.ops import OPS
from edge.ops.recurrent import LOGGED, LOGS
from edge.ops.spec import Attribute, Op, Value, index, state, value
from edge.ops.variants import every_variant, variants

DEVICE_DOMAIN = "edge.device"
DEVICE_VERSION = 1

_NEVER_VIEWS = ("Embed", "Norm")
_RUN = index("run", "i32[8]", "edge.launch.RUN_FIELDS")
_SLOTS = index("slots", "i32[T]", "log row of each new token, -1 for none")
_ANCESTORS = index(
    "ancestors",
    "i32[A,A]",
    "A is 1: a chain. A is T: a tree, [t,j] is 1 when j is t or on t's path",
)
_CONV_TAPS = (
    index("taps", "i32[T,K]", "rows of [state slot: K-1 | log: S | x: T] that each token reads, "
          "oldest first, itself last"),
    index("state_taps", "i32[K-1]", "rows that are the stored state; looked at when one is"),
)  # fmt: skip
_STEERED = ("taps", "kept_taps", "kept", "parents", "tree", "last_only", "ancestors", *LOGS)


def device_name(op: str, attributes: Mapping[str, float]) -> str:
    """The device op of a planned node: an op of `edge.ops`, or a pair of `lowering.fuse`.

    A norm with the attribute `rows` set picks the wanted rows.
    """
    if attributes.get("rows"):
        return f"{op}Rows"
    for tail in ("Dt", "HadamardQuantize"):
        if op.endswith(tail) and op != tail:
            return variants(op.removesuffix(tail), attributes) + tail
    return variants(op, attributes)


def in_place(op: Op) -> dict[str, str]:
    """Outputs that are an input's memory: output → input."""
    inputs = {v.name for v in op.inputs}
    outputs = (v.name for v in op.outputs if v.name.endswith("_out"))
    return {name: name.removesuffix("_out") for name in outputs if name[:-4] in inputs}


def viewable(op: Op) -> tuple[str, ...]:
    """Inputs that may be columns of a wider tensor."""
    attributes = {a.name for a in op.attributes}
    return tuple(v.name for v in op.inputs if f"{v.name}_start" in attributes)


def _columns(name: str) -> tuple[Attribute, Attribute]:
    return (
        Attribute(f"{name}_start", "int", f"first column of {name} that is read"),
        Attribute(f"{name}_width", "int", "how many are"),
    )


def _narrow(v: Value) -> Value:
    """i32 tokens, and bytes as signed ones."""
    if v.name == "tokens":
        return replace(v, dtypes=("i32",))
    dtypes = tuple(dict.fromkeys("i8" if dtype == "u8" else dtype for dtype in v.dtypes))
    return replace(v, dtypes=dtypes)


def _device(op: Op, inputs: tuple[Value, ...], outputs: tuple[Value, ...], maths: str) -> Op:
    """`op` with other inputs and outputs; what may be a view gets its two attributes."""
    inputs, outputs = tuple(map(_narrow, inputs)), tuple(map(_narrow, outputs))
    views: tuple[Attribute, ...] = ()
    if op.name.startswith("Gated") or not any(part in op.name for part in _NEVER_VIEWS):
        values = (v.name for v in inputs if v.role == "value" and v.shape[-1] != "1")
        views = tuple(one for name in values for one in _columns(name))
    return replace(
        op, inputs=inputs, outputs=outputs, attributes=(*op.attributes, *views), maths=maths
    )


def _stateless(op: Op) -> Op:
    return _device(op, op.inputs, op.outputs, op.maths)


def _of_rows(op: Op) -> Op:
    """A norm of the wanted rows alone. The sum that it norms is wanted by nobody."""
    whole = ("T", "B", "D")
    inputs = tuple(replace(v, shape=whole) if v.role == "value" else v for v in op.inputs)
    return _device(
        op,
        (*inputs, index("rows", "i32[L]", "the wanted tokens")),
        (replace(op.outputs[0], shape=("L", "B", "D")),),
        f"{op.maths}\nand of it y[rows] alone",
    )


def _log(name: str, of: Value) -> Value:
    typed = f"{'|'.join(_narrow(of).dtypes)}[S,B,{of.shape[-1]}]"
    return state(name, typed, f"log: {of.name} of the tokens since the state")


def _out(v: Value) -> Value:
    return replace(v, name=f"{v.name}_out", doc=f"{v.name} after the run, in place")


def _two_slots(v: Value) -> Value:
    return replace(v, shape=("2", *v.shape), doc="two slots of it, in place")


def _recurrent(op: Op, logs: Mapping[str, str], steering: tuple[Value, ...], maths: str) -> Op:
    """An op with a state of fixed size. `logs`: name of a log → the input that it keeps."""
    own = tuple(
        _two_slots(v) if v.role == "state" else v for v in op.inputs if v.name not in _STEERED
    )
    named = {v.name: v for v in own}
    kept = tuple(_log(log, named[name]) for log, name in logs.items())
    states = tuple(v for v in own if v.role == "state") + kept
    outputs = (op.outputs[0], *map(_out, states))
    own_maths = op.maths.removeprefix(LOGGED)  # logs are memory here, not inputs
    return _device(op, (*own, *kept, *steering), outputs, f"{own_maths}\n{maths}")


def _conv(op: Op) -> Op:
    return _recurrent(
        op,
        {"conv_in": "x"},
        (_RUN, *_CONV_TAPS, _SLOTS),
        "where i = concat(conv_state[run[SOURCE]], conv_in, x). conv_state_out[run[TARGET]] = "
        "i[state_taps] where run[STORE] is not 0; conv_in_out[slots[t]] = x[t] where slots[t] ≥ 0",
    )


def _scan(op: Op) -> Op:
    return _recurrent(
        op,
        {"scan_x": "x", "scan_dt": "dt", "scan_B": "B"},
        (
            _RUN,
            index("replay", "i32[P]", "log rows, oldest first: run[PENDING] of them; P ≥ 1"),
            _SLOTS,
            _ANCESTORS,
        ),
        "where the state before the run is ssm_state[run[SOURCE]] and then, one after the other, "
        "the tokens at rows replay[:run[PENDING]] of the logs. ssm_state_out[run[TARGET]] is, by "
        "run[STORE], 0: as it was, 1: the state after the first run[ADVANCE] ≥ 1 of these, 2: the "
        "one after the run. scan_x_out[slots[t]] = x[t], where slots[t] ≥ 0; dt and B likewise. "
        "The ONNX function takes every run for a chain",
    )


def _renamed(v: Value, names: Mapping[str, str], symbols: Mapping[str, str]) -> Value:
    """Another name, and other symbols in its shape: `1|N` has the symbol N."""
    shape = tuple("|".join(symbols.get(one, one) for one in dim.split("|")) for dim in v.shape)
    return replace(_narrow(v), name=names.get(v.name, v.name), shape=shape)


def _with_dt(op: Op, product: Op) -> Op:
    """A device scan whose dt is made here, of its product's inputs."""
    names = {"x": "low_dt", "x_scale": "low_dt_scale"}
    names |= {"weight": "dt_weight", "weight_scale": "dt_weight_scale"}
    symbols = {"O": "E", "N": "E", "I": "R", "K": "R"}
    made = tuple(_renamed(v, names, symbols) for v in product.inputs if v.name != "y_scale")
    kept = tuple(v for v in op.inputs if v.name != "dt")
    attributes = tuple(a for a in op.attributes if a not in _columns("dt"))
    y_scale = ", dt_scale" if len(made) > 2 else ""
    return replace(
        op,
        name=f"{op.name}Dt",
        inputs=(*kept, *made),
        attributes=(*attributes, *_columns("low_dt")),
        maths=f"dt = {product.name}({', '.join(v.name for v in made)}{y_scale})\n{op.maths}",
        source=f"{product.name}, then {op.name}",
    )


def _product_and_conv(product: Op, conv: Op) -> Op:
    """A product, some columns of which a device convolution reads."""
    # K is the convolution's
    symbols = {"K": "I", "N": "O"}
    names = {v.name: f"conv_{v.name}" for v in conv.inputs if v.role == "weight"}
    y = replace(_renamed(product.outputs[0], {}, symbols), doc="the product")
    convolved = replace(conv.outputs[0], name="conv_y", doc="the convolution of C columns of it")
    return replace(
        product,
        name=f"{product.name}Conv",
        inputs=(
            *(_renamed(v, {}, symbols) for v in product.inputs),
            *(_renamed(v, names, {}) for v in conv.inputs if v.name != "x"),
        ),
        outputs=(y, convolved, *conv.outputs[1:]),
        attributes=(
            *_columns("x"),
            Attribute("conv_start", "int", "first column of y that the convolution reads"),
        ),
        maths=f"y = {product.name}(…)\n"
        f"conv_y and states: {conv.name} of y[conv_start : conv_start + C] by conv_…",
        source=f"{product.name}, then {conv.name}",
    )


def _norm_and_rotation(norm: Op, rotation: Op) -> Op:
    name = f"{norm.name}{rotation.name}"
    return replace(
        norm,
        name=name,
        inputs=(*norm.inputs, *rotation.inputs[1:]),
        outputs=tuple(map(_narrow, rotation.outputs)),
        maths=f"x' = {norm.name}(…)\ny = {rotation.name}(x', slow, fast, scale)",
        source=f"{norm.name}, then {rotation.name}",
    )


def _attention(op: Op) -> Op:
    """Keys and values go to slots run[PAST] … of the caches; those before are the past."""
    caches = tuple(
        state(v.name, "f32[B,KV,C,P]", "slots below run[PAST] are valid")
        for v in op.inputs
        if v.role == "state"
    )
    flowing = tuple(
        value(v.name, f"f32[T,B,{v.shape[-1]}]", v.doc)
        for v in op.inputs
        if v.name in ("q", "k", "v")
    )
    y = value("y", "f32[T,B,H·P]", "")
    return _device(
        op,
        (*flowing, *caches, _RUN, _ANCESTORS),
        (y, *map(_out, caches)),
        "slots run[PAST] … run[PAST]+T-1 of the caches get k and v\n"
        "y = softmax(scale · q·Kᵀ) · V over the slots below run[PAST] and those of the run that "
        "are t or, for a chain, before it, for a tree, on its path",
    )


def _rotary(attention: Op, rope: Op) -> Op:
    return replace(
        attention,
        name="RotaryAttention",
        inputs=(*attention.inputs, *rope.inputs[1:]),
        attributes=(*attention.attributes, *(a for a in rope.attributes if a.name == "dim")),
        maths=f"q, k = {rope.name}(q), {rope.name}(k)\n{attention.maths}",
        source=f"{rope.name}, then {attention.name}",
    )


GREEDY = Op(
    "Greedy",
    (value("logits", "f32[L,B,V]", ""),),
    (value("picked", "i32[L,B]", "the best token of each row"),),
    (),
    "picked = the lowest v of the largest logits[…,v]; -1 where one of them is NaN",
    "ONNX ArgMax",
)


def _statements() -> list[Op]:
    """One for each op; variants have equal ones."""
    convs = {name: _conv(OPS[name]) for name in ("CausalConv1d", "CausalConv1dInt8")}
    scans = {name: _scan(op) for name, op in OPS.items() if name.startswith("SelectiveScan")}
    attention = _attention(OPS["Attention"])
    others = {"Attention": attention, **convs, **scans}
    found = [others.get(name) or _stateless(op) for name, op in OPS.items() if name != "Rope"]
    norms = (op for name, op in OPS.items() if name.startswith("Add"))
    return [
        *found,
        *(replace(_of_rows(op), name=f"{op.name}Rows") for op in norms),
        _product_and_conv(OPS["Linear"], convs["CausalConv1d"]),
        _product_and_conv(OPS["LinearInt8Quantize"], convs["CausalConv1dInt8"]),
        _with_dt(scans["SelectiveScan"], OPS["Linear"]),
        _with_dt(scans["SelectiveScanInt8"], OPS["LinearInt8Quantize"]),
        _norm_and_rotation(_stateless(OPS["GatedRMSNormInt8"]), OPS["HadamardQuantize"]),
        _rotary(attention, OPS["Rope"]),
        GREEDY,
    ]


def _functions(op: Op) -> list[str]:
    """Names of the variants, whose numbers stand behind the first op of a pair."""
    for tail in ("Dt", "HadamardQuantize"):
        if op.name.endswith(tail) and op.name not in OPS:
            return [f"{name}{tail}" for name in every_variant(op.name.removesuffix(tail))]
    return list(every_variant(op.name))


DEVICE_OPS: dict[str, Op] = {
    name: replace(op, name=name) for op in _statements() for name in _functions(op)
}
