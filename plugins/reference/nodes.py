"""The `edge` ops on floating values, as graph nodes: from a node's inputs to the references.

Graphs are time-major ([T, B, …]), references batch-first. Runs are chains: what says so (`tree`,
`parents`, `ancestors`, `taps`) is checked once a run, by `edge.plugins.reference.graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.reference.attention import attention, rope_tables
from edge.plugins.reference.bits import dequantize_bits, unpack_bits
from edge.plugins.reference.conv import causal_conv1d
from edge.plugins.reference.nodes_standard import Adapter, Attributes, Outputs
from edge.plugins.reference.norm import gated_rms_norm, layer_norm, rms_norm
from edge.plugins.reference.scan import selective_scan, selective_scan_heads


def swap(x: Tensor) -> Tensor:
    """[T, B, …] ↔ [B, T, …]."""
    return x.transpose(0, 1)


def _embed(a: Attributes, tokens: Tensor, table: Tensor) -> Outputs:
    return (table[tokens].float(),)


def _embed_bits(a: Attributes, tokens: Tensor, packed: Tensor, scales: Tensor) -> Outputs:
    rows = unpack_bits(packed[tokens], a["bits"]).float()
    return ((rows * scales[tokens][..., None]).flatten(-2),)


def _linear(a: Attributes, x: Tensor, weight: Tensor) -> Outputs:
    return (F.linear(x, weight.float()),)


def _linear_bits(a: Attributes, x: Tensor, packed: Tensor, scales: Tensor) -> Outputs:
    return (F.linear(x, dequantize_bits(packed, scales, a["bits"])),)


def _rms_norm(a: Attributes, x: Tensor, weight: Tensor) -> Outputs:
    return (rms_norm(x, weight, a["eps"]),)


def _add_rms_norm(a: Attributes, x: Tensor, added: Tensor, weight: Tensor) -> Outputs:
    total = x + added
    return rms_norm(total, weight, a["eps"]), total


def _layer_norm(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
    return (layer_norm(x, weight, bias, a["eps"]),)


def _add_layer_norm(
    a: Attributes, x: Tensor, added: Tensor, weight: Tensor, bias: Tensor
) -> Outputs:
    total = x + added
    return layer_norm(total, weight, bias, a["eps"]), total


def _gated_rms_norm(a: Attributes, x: Tensor, z: Tensor, weight: Tensor) -> Outputs:
    return (gated_rms_norm(x, z, weight, a["eps"], a["groups"]),)


def _silu_gate(a: Attributes, x: Tensor, z: Tensor) -> Outputs:
    return (x * F.silu(z),)


def _gelu(a: Attributes, x: Tensor) -> Outputs:
    return (F.gelu(x),)


def _gelu_tanh(a: Attributes, x: Tensor) -> Outputs:
    return (F.gelu(x, approximate="tanh"),)


def _causal_conv1d(
    a: Attributes,
    x: Tensor,
    conv_state: Tensor,
    taps: Tensor,
    kept_taps: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Outputs:
    y, _ = causal_conv1d(swap(x), swap(conv_state), weight[:, 0].T, bias)
    return swap(y), torch.cat([conv_state, x])[kept_taps]


def by_pieces(
    run: Callable[[slice, Tensor], tuple[Tensor, Tensor]], state: Tensor, kept: Tensor, steps: int
) -> Outputs:
    """A scan's y [T, B, …] and its state after each kept token, by runs that end there.

    `run(tokens, state)` gives y [B, tokens, …] and the state after the last of them.
    """
    ends = [0, *(int(token) + 1 for token in kept.tolist())]
    ends = ends if ends[-1] == steps else [*ends, steps]
    ys, states = [], []
    for start, stop in pairwise(ends):
        y, state = run(slice(start, stop), state)
        ys.append(y)
        states.append(state)
    return swap(torch.cat(ys, 1)), torch.stack(states[: kept.numel()])


def with_logs(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *logs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A Mamba-2 scan's values with the logged tokens' x, dt and B, if there are any, before them;
    as their output is wanted by nobody, their C is 0.
    """
    if not logs or not len(logs[0]):
        return x, dt, B, C
    x, dt, B = (torch.cat([log, own]) for log, own in zip(logs, (x, dt, B), strict=True))
    return x, dt, B, torch.cat([C.new_zeros(len(x) - len(C), *C.shape[1:]), C])


def run_only(found: Outputs, *logs: Tensor) -> Outputs:
    """Without the outputs of the logged tokens."""
    y, states = found
    return (y[len(logs[0]) :] if logs else y), states


Scan = Callable[..., tuple[Tensor, Tensor]]


def scan_node(
    a: Attributes,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    kept: Tensor,
    parents: Tensor,
    tree: Tensor,
    last_only: Tensor,
    *,
    scan: Scan = selective_scan,
) -> Outputs:
    """`edge::SelectiveScan` by any function with the signature of `selective_scan`."""
    A_log = torch.log(-A).T
    x, dt, B, C, z = map(swap, (x, dt, B, C, z))

    def run(now: slice, h: Tensor) -> tuple[Tensor, Tensor]:
        xs, dts, Bs, Cs, zs = (m[:, now] for m in (x, dt, B, C, z))
        return scan(xs, dts, A_log, Bs, Cs, D, dt_bias, zs, h)

    return by_pieces(run, ssm_state, kept, x.shape[1])


def scan_heads_node(
    a: Attributes,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    kept: Tensor,
    ancestors: Tensor,
    *logs: Tensor,
    scan: Scan = selective_scan_heads,
) -> Outputs:
    """`edge::SelectiveScanHeads` by any function with the signature of `selective_scan_heads`."""
    A_log = torch.log(-A)
    x, dt, B, C = map(swap, with_logs(x, dt, B, C, *logs))
    x = x.unflatten(-1, (a["heads"], a["head_dim"]))
    B, C = (m.unflatten(-1, (a["groups"], a["d_state"])) for m in (B, C))
    limit = (a["dt_min"], a["dt_max"])

    def run(now: slice, h: Tensor) -> tuple[Tensor, Tensor]:
        xs, dts, Bs, Cs = (m[:, now] for m in (x, dt, B, C))
        y, h = scan(xs, dts, A_log, Bs, Cs, D, dt_bias, h, limit)
        return y.flatten(-2), h

    return run_only(by_pieces(run, ssm_state, kept, x.shape[1]), *logs)


def _rope(a: Attributes, x: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    heads = x.unflatten(-1, (a["heads"], a["head_dim"])).transpose(1, 2)
    return (rope_tables(heads, cos, sin).transpose(1, 2).flatten(-2),)


def _attention(
    a: Attributes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    last: Tensor,
    total: Tensor,
    bias: Tensor,
) -> Outputs:
    end, steps = int(total), q.shape[1]
    if q.shape[0] > 1 and 1 < steps < end:
        raise ValueError("several sequences of several tokens need empty caches")

    def split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, a["head_dim"])).transpose(1, 2)

    caches = []
    for cache, new in ((key_cache, k), (value_cache, v)):
        written = cache.clone()
        written[:, :, end - steps : end] = split(new, a["kv_heads"])
        caches.append(written)
    keys, values = (cache[:, :, :end] for cache in caches)
    y = attention(split(q, a["heads"]), keys, values, bias, a["scale"])
    return y.transpose(1, 2).flatten(-2), *caches


FLOATING: dict[str, Adapter] = {
    "Embed": _embed,
    "EmbedBits": _embed_bits,
    "Linear": _linear,
    "LinearBits": _linear_bits,
    "RMSNorm": _rms_norm,
    "AddRMSNorm": _add_rms_norm,
    "LayerNorm": _layer_norm,
    "AddLayerNorm": _add_layer_norm,
    "GatedRMSNorm": _gated_rms_norm,
    "SiluGate": _silu_gate,
    "Gelu": _gelu,
    "GeluTanh": _gelu_tanh,
    "CausalConv1d": _causal_conv1d,
    "SelectiveScan": scan_node,
    "SelectiveScanHeads": scan_heads_node,
    "Rope": _rope,
    "Attention": _attention,
}
