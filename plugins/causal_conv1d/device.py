"""Device ops of the convolution with its state in place, alone or fused to a product.

They call the functional op: [state slot | log | new tokens], from which a token reads, serves as
its state and x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edge.ops import DEVICE_DOMAIN, Attribute, Op, index
from edge.plugins.catalogue import OPS
from edge.plugins.causal_conv1d.statement import (
    CAUSAL_CONV1D,
    CAUSAL_CONV1D_INT8,
    CAUSAL_CONV_PLAIN,
)
from edge.plugins.device.rules import RUN, SLOTS, columns, recurrent, renamed, stateless
from edge.plugins.device.text import CONSTANTS, call, fields, logs, stored, views
from edge.plugins.linear.statement import LINEAR, LINEAR_INT8_QUANTIZE

_TAPS = (
    index("taps", "i32[T,K]", "rows of [state slot: K-1 | log: S | x: T] that each token reads, "
          "oldest first, itself last"),
    index("state_taps", "i32[K-1]", "rows to store as the state; read only if run[STORE] is set"),
)  # fmt: skip


def behind_product(op: Op) -> dict[str, str]:
    """Return the names of the convolution's inputs in the fused op, where weights have a prefix."""
    return {v.name: f"conv_{v.name}" if v.role == "weight" else v.name for v in op.inputs}


# products, and the convolutions after them
_FUSED = ((LINEAR, CAUSAL_CONV1D), (LINEAR_INT8_QUANTIZE, CAUSAL_CONV1D_INT8))


def statements() -> Iterator[Op]:
    for product, op in _FUSED:
        conv = _standalone(op)
        yield conv
        yield _fused_with_product(product, conv)
    yield _standalone(CAUSAL_CONV_PLAIN)


def _standalone(op: Op) -> Op:
    return recurrent(
        op,
        {"conv_in": "x"},
        (RUN, *_TAPS, SLOTS),
        f"{op.maths}\nwhere i = concat(conv_state[run[SOURCE]], conv_in, x). "
        "conv_state_out[run[TARGET]] = i[state_taps] where run[STORE] is not 0; "
        "conv_in_out[slots[t]] = x[t] where slots[t] ≥ 0",
    )


def _fused_with_product(product: Op, conv: Op) -> Op:
    """Return the fusion of a product and the convolution of some of its columns."""
    # in the fused op, K is the width of the convolution
    symbols = {"K": "I", "N": "O"}
    names = behind_product(conv)
    y = replace(renamed(product.outputs[0], {}, symbols), doc="the product")
    convolved = replace(conv.outputs[0], name="conv_y", doc="the convolution of C columns of it")
    return replace(
        product,
        name=f"{product.name}Conv",
        inputs=(
            *(renamed(v, {}, symbols) for v in product.inputs),
            *(renamed(v, names, {}) for v in conv.inputs if v.name != "x"),
        ),
        outputs=(y, convolved, *conv.outputs[1:]),
        attributes=(
            *columns("x"),
            Attribute("conv_start", "int", "first column of y that the convolution reads"),
        ),
        maths=f"y = {product.name}(…)\n"
        f"conv_y and states: {conv.name} of y[conv_start : conv_start + C] by conv_…",
        source=f"{product.name}, then {conv.name}",
    )


# -- bodies ----------------------------------------------------------------------------------------


def _conv(op: Op, x: str, prefix: str = "") -> str:
    """Return nodes that make `{prefix}y` and the new states; weights have the prefix too."""
    names = {v.name: f"{prefix}{v.name}" for v in op.inputs if v.role == "weight"}
    names |= {"x": x, "conv_state": "conv_before", "kept_taps": "kept_taps"}
    return (
        fields("source", "target", "store")
        + """
    conv_slot = Gather<axis=0>(conv_state, source)
    conv_before = Concat<axis=0>(conv_slot, conv_in)
    any_row = Constant<value = int32 {0}>()
    keeps = Greater(store, from_0)
    safe_taps = Where(keeps, state_taps, any_row)
    kept_taps = Unsqueeze(safe_taps, axis_0)
"""
        + call(op.name, op, names, {"y": f"{prefix}y"})
        + stored("conv_state", "conv_states")
        + logs({"conv_in": x})
    )


# The number of channels of the convolution is that of its weight.
_CONVOLVED = """
    first_0 = Constant<value_int: int = @conv_start>()
    first = Reshape(first_0, end)
    channels = Shape<start=-1>(conv_weight)
    behind = Add(first, channels)
    convolved = Slice(y, first, behind, end)
"""


def body(op: str) -> str:
    """Return the body of a convolution, alone or fused to its product."""
    for product, conv in _FUSED:
        if op == f"{product.name}Conv":
            product_call = call(product.name, stateless(product), {}, {}, DEVICE_DOMAIN)
            return CONSTANTS + product_call + _CONVOLVED + _conv(conv, "convolved", prefix="conv_")
    return CONSTANTS + views(["x"]) + _conv(OPS[op], "x_own")
