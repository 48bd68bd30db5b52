"""The `edge` ops on int8 values, as graph nodes: from a node's inputs to the references.

An int8 value is int8 here, also where bodies made for one runtime carry it as u8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edge.plugins.reference.hadamard import hadamard
from edge.plugins.reference.linear_int8 import (
    linear_int4,
    linear_int4_quantize,
    linear_int8,
    linear_int8_quantize,
)
from edge.plugins.reference.nodes import by_pieces, run_only, swap, with_logs
from edge.plugins.reference.nodes_standard import Adapter, Attributes, Outputs
from edge.plugins.reference.quantize import (
    dequantize,
    embed_int8,
    fake_quantize,
    fake_quantize_rows,
    gated_rms_norm_int8,
    quantize,
    quantize_rows,
    rms_norm_quantize,
)
from edge.plugins.reference.quantized_recurrent import (
    causal_conv1d_int8,
    selective_scan_heads_int8,
    selective_scan_int8,
)


def _quantize(a: Attributes, x: Tensor, scale: Tensor) -> Outputs:
    return (quantize(x, scale),)


def _quantize_rows(a: Attributes, x: Tensor) -> Outputs:
    return quantize_rows(x)


def _dequantize(a: Attributes, x: Tensor, scale: Tensor) -> Outputs:
    return (dequantize(x, scale),)


def _fake_quantize(a: Attributes, x: Tensor, scale: Tensor) -> Outputs:
    return (fake_quantize(x, scale),)


def _fake_quantize_rows(a: Attributes, x: Tensor) -> Outputs:
    return (fake_quantize_rows(x),)


def _linear_int8(
    a: Attributes, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor
) -> Outputs:
    return (linear_int8(x, x_scale, weight, weight_scale),)


def _linear_int8_quantize(
    a: Attributes,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    y_scale: Tensor,
) -> Outputs:
    return (linear_int8_quantize(x, x_scale, weight, weight_scale, y_scale),)


def _linear_int4(
    a: Attributes, x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor
) -> Outputs:
    return (linear_int4(x, x_scale, packed, scales),)


def _linear_int4_quantize(
    a: Attributes, x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor, y_scale: Tensor
) -> Outputs:
    return (linear_int4_quantize(x, x_scale, packed, scales, y_scale),)


def _rms_norm_quantize(a: Attributes, x: Tensor, weight: Tensor, scale: Tensor) -> Outputs:
    return (rms_norm_quantize(x, weight, scale, a["eps"]),)


def _add_rms_norm_quantize(
    a: Attributes, x: Tensor, added: Tensor, weight: Tensor, scale: Tensor
) -> Outputs:
    total = x + added
    return rms_norm_quantize(total, weight, scale, a["eps"]), total


def _gated_rms_norm_int8(
    a: Attributes, x: Tensor, z: Tensor, z_scale: Tensor, weight: Tensor
) -> Outputs:
    return (gated_rms_norm_int8(x, z, z_scale, weight, a["eps"], a["groups"]),)


def _hadamard(a: Attributes, x: Tensor, slow: Tensor, fast: Tensor) -> Outputs:
    return (hadamard(x, slow, fast),)


def _hadamard_quantize(
    a: Attributes, x: Tensor, slow: Tensor, fast: Tensor, scale: Tensor
) -> Outputs:
    return (quantize(hadamard(x, slow, fast), scale),)


def _embed_int8(a: Attributes, tokens: Tensor, table: Tensor, scale: Tensor) -> Outputs:
    return (embed_int8(tokens, table, scale),)


def _causal_conv1d_int8(
    a: Attributes,
    x: Tensor,
    x_scale: Tensor,
    conv_state: Tensor,
    taps: Tensor,
    kept_taps: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    bias_scale: Tensor,
    y_scale: Tensor,
) -> Outputs:
    y, _ = causal_conv1d_int8(
        swap(x), x_scale, swap(conv_state), weight[:, 0].T, weight_scale, bias, bias_scale, y_scale
    )
    return swap(y), torch.cat([conv_state, x])[kept_taps]


def _selective_scan_int8(
    a: Attributes,
    x: Tensor,
    x_scale: Tensor,
    dt: Tensor,
    dt_scale: Tensor,
    B: Tensor,
    B_scale: Tensor,
    C: Tensor,
    C_scale: Tensor,
    z: Tensor,
    z_scale: Tensor,
    A_log: Tensor,
    A_log_scale: Tensor,
    D: Tensor,
    D_scale: Tensor,
    dt_bias: Tensor,
    dt_bias_scale: Tensor,
    ssm_state: Tensor,
    state_scale: Tensor,
    kept: Tensor,
    *chain: Tensor,
) -> Outputs:
    x, dt, B, C, z = map(swap, (x, dt, B, C, z))

    def run(now: slice, s: Tensor) -> tuple[Tensor, Tensor]:
        xs, dts, Bs, Cs, zs = (m[:, now] for m in (x, dt, B, C, z))
        return selective_scan_int8(
            xs, x_scale, dts, dt_scale, A_log.T, A_log_scale, Bs, B_scale, Cs, C_scale,
            D, D_scale, dt_bias, dt_bias_scale, zs, z_scale, s, state_scale,
        )  # fmt: skip

    return by_pieces(run, ssm_state, kept, x.shape[1])


def _selective_scan_heads_int8(
    a: Attributes,
    x: Tensor,
    x_scale: Tensor,
    dt: Tensor,
    dt_scale: Tensor,
    B: Tensor,
    B_scale: Tensor,
    C: Tensor,
    C_scale: Tensor,
    A_log: Tensor,
    A_log_scale: Tensor,
    D: Tensor,
    D_scale: Tensor,
    dt_bias: Tensor,
    dt_bias_scale: Tensor,
    ssm_state: Tensor,
    state_scale: Tensor,
    kept: Tensor,
    parents: Tensor,
    tree: Tensor,
    last_only: Tensor,
    *ancestors_and_logs: Tensor,
) -> Outputs:
    logs = ancestors_and_logs[1:]
    x, dt, B, C = map(swap, with_logs(x, dt, B, C, *logs))

    def run(now: slice, s: Tensor) -> tuple[Tensor, Tensor]:
        xs, dts, Bs, Cs = (m[:, now] for m in (x, dt, B, C))
        return selective_scan_heads_int8(
            xs, x_scale, dts, dt_scale, A_log, A_log_scale, Bs, B_scale, Cs, C_scale,
            D, D_scale, dt_bias, dt_bias_scale, s, state_scale,
            a["groups"], (a["dt_min"], a["dt_max"]),
        )  # fmt: skip

    return run_only(by_pieces(run, ssm_state, kept, x.shape[1]), *logs)


INT8: dict[str, Adapter] = {
    "Quantize": _quantize,
    "QuantizeRows": _quantize_rows,
    "Dequantize": _dequantize,
    "FakeQuantize": _fake_quantize,
    "FakeQuantizeRows": _fake_quantize_rows,
    "LinearInt8": _linear_int8,
    "LinearInt8Quantize": _linear_int8_quantize,
    "LinearInt8Rows": _linear_int8,
    "LinearInt4": _linear_int4,
    "LinearInt4Quantize": _linear_int4_quantize,
    "RMSNormQuantize": _rms_norm_quantize,
    "AddRMSNormQuantize": _add_rms_norm_quantize,
    "GatedRMSNormInt8": _gated_rms_norm_int8,
    "Hadamard": _hadamard,
    "HadamardQuantize": _hadamard_quantize,
    "EmbedInt8": _embed_int8,
    "CausalConv1dInt8": _causal_conv1d_int8,
    "SelectiveScanInt8": _selective_scan_int8,
    "SelectiveScanHeadsInt8": _selective_scan_heads_int8,
}
