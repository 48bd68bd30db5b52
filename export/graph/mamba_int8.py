"""Mamba layers whose values travel in int8 from one projection to the other (Quamba, figure 4)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge.config import Mamba1Config, Mamba2Config
from edge.export.graph.builder import F32
from edge.export.graph.constants import constant_int8, conv_parts, rounded_constant
from edge.export.graph.layers import head_attributes
from edge.export.graph.place import Place, joined
from edge.export.graph.products import Input, input_scale, scale_of
from edge.launch import DType

_STATES = {"fp32": ("f32", 32), "fp16": ("f16", 16), "int8": ("i8", 8)}


def _scale(at: Place, site: str) -> F32:
    scale = at.scan.sites[site].scale
    assert scale is not None
    return scale


def _convolution(at: Place, layer: Mamba1Config | Mamba2Config, x: str, y_scale: F32) -> str:
    """Convolution, SiLU and rounding; binds the layer's conv_state and emits its kept rows."""
    g, rows, channels = at.g, layer.d_conv - 1, layer.conv_channels
    parts = conv_parts(layer)
    taps, kept_taps = at.shared.taps[layer.d_conv]
    zeros = np.zeros(channels, np.float32)
    inputs = [
        x,
        scale_of(g, at.named("conv_in.scale"), _scale(at, "conv_in")),
        g.input(at.named("conv_state"), "i8", [rows, "B", channels]),
        taps,
        kept_taps,
        *constant_int8(at, "conv1d.weight", lambda w: w.T[:, None, :], parts),
        *(
            constant_int8(at, "conv1d.bias", None, parts)
            if layer.conv_bias
            else rounded_constant(at, at.named("conv1d.bias"), zeros)
        ),
        scale_of(g, at.named("conv.scale"), y_scale),
    ]
    outputs = [at.named("conv.q"), at.named("conv_states")]
    y, states = g.call("CausalConv1dInt8", inputs, outputs)
    g.output(states, ["R", rows, "B", channels], "i8")
    return y


def _scan(
    at: Place,
    op: str,
    values: dict[str, str],
    constants: list[str],
    shape: list[int],
    **attributes: float,
) -> str:
    """The scan over values by site name; binds ssm_state and emits its kept states."""
    g = at.g
    dtype, bits = _STATES[at.scan.state]
    scale = at.scan.state_scale if at.scan.state == "int8" else np.ones(1, np.float32)
    assert scale is not None
    inputs = []
    for site, value in values.items():
        inputs += [value, scale_of(g, at.named(f"{site}.scale"), _scale(at, site))]
    state_scale = at.named("ssm_state.scale")
    logged = op == "SelectiveScanHeadsInt8" and bits == 32
    inputs += [
        *constants,
        g.input(at.named("ssm_state"), dtype, ["B", *shape]),
        g.floats(state_scale, scale) if scale.size == 1 else g.constant(state_scale, scale),
        "stored" if logged else "kept",
        "parents",
        "tree",
        "last_only",
        *(_logs(at, values, shape, attributes) if logged else []),
    ]
    outputs = [at.named("scan"), at.named("ssm_states")]
    y, states = g.call(op, inputs, outputs, state_bits=bits, **attributes)
    g.output(states, ["S" if logged else "R", "B", *shape], dtype)
    return y


def _logs(
    at: Place, values: dict[str, str], shape: list[int], attributes: Mapping[str, float]
) -> list[str]:
    """What Mamba-2's scan reads besides when its state is not rounded."""
    heads, head_dim, d_state = shape
    widths = {"x": heads * head_dim, "dt": heads, "B": int(attributes["groups"]) * d_state}
    # the flavour `ort` holds x and B as u8
    types: dict[str, DType] = dict.fromkeys(widths, "i8")
    if at.g.flavour == "ort":
        types |= {"x": "u8", "B": "u8"}
    return ["paths", *(at.g.log(values[site], widths[site], types[site]) for site in widths)]


def mamba1(at: Place, layer: Mamba1Config, u: Input) -> str:
    """Mamba-1: the scan's input x is what the convolution rounds, and what x_proj reads."""
    g, inner, n, rank = at.g, layer.d_inner, layer.d_state, layer.dt_rank
    both = joined((_scale(at, "conv_in"), inner), (_scale(at, "z"), inner))
    xz = at.linear_to_int8("in_proj", u, "xz.q", scale_of(g, at.named("xz.scale"), both))
    x, z = at.split(xz, {"x.q": inner, "z.q": inner})
    x = _convolution(at, layer, x, _scale(at, "x"))
    dbc = at.linear("x_proj", Input(rounded=x), "dbc")
    low_scale = input_scale(at.plan.products["dt_proj"], rank)
    three = joined((low_scale, rank), (_scale(at, "B"), n), (_scale(at, "C"), n))
    dbc = g.call("Quantize", [dbc, scale_of(g, at.named("dbc.scale"), three)], [at.named("dbc.q")])[
        0
    ]
    low, b, c = at.split(dbc, {"low_rank_dt.q": rank, "B.q": n, "C.q": n})
    dt_scale = scale_of(g, at.named("dt.scale"), _scale(at, "dt"))
    dt = at.linear_to_int8("dt_proj", Input(rounded=low), "dt.q", dt_scale)
    constants = [
        *constant_int8(at, "A_log", np.transpose),
        *constant_int8(at, "D"),
        *constant_int8(at, "dt_proj.bias"),
    ]
    values = {"x": x, "dt": dt, "B": b, "C": c, "z": z}
    y = _scan(at, "SelectiveScanInt8", values, constants, [n, inner])
    return at.linear("out_proj", at.read(y, "out_proj", inner), "out")


def mamba2(at: Place, layer: Mamba2Config, u: Input) -> str:
    """Mamba-2: x, B and C are convolved together, the gate is part of the norm."""
    g, wide, shares = at.g, layer.d_ssm, layer.n_groups * layer.d_state
    parts = {"z": wide, "conv_in": layer.conv_channels, "dt": layer.n_heads}
    rows = joined(*((_scale(at, site), width) for site, width in parts.items()))
    projected = at.linear_to_int8(
        "in_proj", u, "zxbcdt.q", scale_of(g, at.named("zxbcdt.scale"), rows)
    )
    z, xbc, dt = at.split(projected, {"z.q": wide, "xBC.q": parts["conv_in"], "dt.q": parts["dt"]})
    widths = {"x": wide, "B": shares, "C": shares}
    xbc = _convolution(
        at, layer, xbc, joined(*((_scale(at, site), width) for site, width in widths.items()))
    )
    x, b, c = at.split(xbc, {f"{site}.q": width for site, width in widths.items()})
    constants = [
        *constant_int8(at, "A_log"), *constant_int8(at, "D"), *constant_int8(at, "dt_bias")
    ]  # fmt: skip
    values = {"x": x, "dt": dt, "B": b, "C": c}
    shape = [layer.n_heads, layer.head_dim, layer.d_state]
    y = _scan(at, "SelectiveScanHeadsInt8", values, constants, shape, **head_attributes(layer))
    y = _gate(at, layer, y, z)
    return at.linear("out_proj", at.read(y, "out_proj", wide), "out")


def _gate(at: Place, layer: Mamba2Config, y: str, z: str) -> str:
    g = at.g
    scale = scale_of(g, at.named("z.scale"), _scale(at, "z"))
    if not layer.gated_norm:
        z = g.call("Dequantize", [z, scale], [at.named("z")])[0]
        return g.call("SiluGate", [y, z], [at.named("gated")])[0]
    return g.call(
        "GatedRMSNormInt8",
        [y, z, scale, g.weight(at.named("gated_norm.weight"))],
        [at.named("gated")],
        eps=g.config.norm.eps,
        groups=layer.n_groups,
    )[0]
