"""Gated DeltaNet. Only its products are quantized; the rest runs on floating ops."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge.errors import ExportError
from edge.export.mixers.base import Conv1d, Fetch, MixerExport, Scale, State, Stored, initial
from edge.export.mixers.mamba import convolution, initial_dt_bias, log_of_rate
from edge.export.nodes.builder import F32
from edge.export.nodes.layer import LayerGraph
from edge.export.nodes.products import ProductInput
from edge.export.quantize.layer_plan import LayerPlanner, Matrix
from edge.export.quantize.plan import LayerPlan
from edge.mixers.gated_deltanet import GatedDeltaNetConfig
from edge.plugins.gated_delta_rule.reference import gated_delta_rule
from edge.plugins.group_norm.reference import group_rms_norm

# Added to the squared length of a key or query, as in Flash Linear Attention.
UNIT_EPS = 1e-6


class GatedDeltaNet(nn.Module):
    def __init__(self, config: GatedDeltaNetConfig, d_model: int, eps: float) -> None:
        super().__init__()
        self.config, self.eps = config, config.norm_eps or eps
        for name, rows in config.in_proj_rows.items():
            self.add_module(name, nn.Linear(d_model, rows, bias=False))
        self.conv1d = Conv1d(config.conv_channels, config.d_conv, False)
        heads = config.n_heads
        self.dt_bias = initial(lambda: initial_dt_bias(heads), heads)
        self.A_log = initial(lambda: torch.log(torch.empty(heads).uniform_(1, 16)), heads)
        self.gated_norm = Scale(config.head_dim)
        self.out_proj = nn.Linear(config.d_inner, d_model, bias=False)

    def forward(self, u: Tensor, state: State, position: int) -> tuple[Tensor, State]:
        c = self.config
        q, k, v, z, a, b = (self.get_submodule(name)(u) for name in c.in_proj_rows)
        convolved, conv_state = self.conv1d(torch.cat([q, k, v], -1), state["conv_state"])
        q, k, v = convolved.split([c.group_states, c.group_states, c.d_inner], -1)
        q, k = (_unit(m.unflatten(-1, (c.n_groups, c.d_state))) for m in (q, k))
        y, ssm_state = gated_delta_rule(
            v.unflatten(-1, (c.n_heads, c.head_dim)), torch.cat([a, b], -1), self.A_log, k,
            q / math.sqrt(c.d_state), self.dt_bias, state["ssm_state"], c.beta_max,
        )  # fmt: skip
        weight = self.gated_norm.weight.repeat(c.n_heads)
        y = group_rms_norm(y.flatten(-2), weight, self.eps, c.n_heads) * F.silu(z)
        return self.out_proj(y), {"conv_state": conv_state, "ssm_state": ssm_state}


def _unit(x: Tensor) -> Tensor:
    """Normalize every row to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


class GatedDeltaNetExport(MixerExport[GatedDeltaNetConfig]):
    """Gated DeltaNet's export. In the graph its input projections are one product."""

    def module(self, d_model: int, eps: float) -> GatedDeltaNet:
        return GatedDeltaNet(self.config, d_model, eps)

    def matrices(self, d_model: int) -> dict[str, Matrix]:
        rows = sum(self.config.in_proj_rows.values())
        return {
            "in_proj": Matrix(rows, d_model, "normed"),
            "out_proj": Matrix(d_model, self.config.d_inner, "gated"),
        }

    def plan(self, planner: LayerPlanner) -> LayerPlan:
        if planner.state != "fp32":
            raise ExportError(
                f"ssm_state cannot be {planner.state}: Gated DeltaNet keeps it in fp32 only",
                field=planner.prefix,
                remedy="--ssm-state fp32",
            )
        return super().plan(planner)

    def walks(self, plan: LayerPlan) -> bool:
        return True

    def weight(self, name: str, fetch: Fetch) -> F32:
        if name == "in_proj.weight":
            return np.concatenate([fetch(f"{part}.weight") for part in self.config.in_proj_rows])
        return fetch(name)

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        module, rows = name.partition(".")[0], self.config.in_proj_rows
        if module in rows:
            order = list(rows)
            start = sum(rows[before] for before in order[: order.index(module)])
            joined = (sum(rows.values()), *shape[1:])
            return Stored("in_proj.weight", joined, lambda w: w[start : start + rows[module]])
        if name == "A_log":
            return Stored(name, shape, log_of_rate)
        if name == "gated_norm.weight":
            return Stored(name, (self.config.d_inner,), lambda w: w[: self.config.head_dim])
        return super().stored(name, shape)

    def nodes(self, at: LayerGraph, u: ProductInput) -> str:
        c, g = self.config, at.g
        projected = at.linear("in_proj", u, "qkvzab")
        qkv, z, ab = at.split(
            projected, {"qkv": c.conv_channels, "z": c.d_inner, "ab": 2 * c.n_heads}
        )
        shared = 2 * c.group_states
        qk, v = at.split(convolution(at, c, qkv), {"qk": shared, "v": c.d_inner})
        q, k = at.split(self._unit(at, qk), {"q": c.group_states, "k": c.group_states})
        y = self._scan(at, {"x": v, "dt": ab, "B": k, "C": q})
        weight = g.weight(at.named("gated_norm.weight"), lambda w: np.tile(w, c.n_heads))
        (y,) = g.call(
            "GroupRMSNorm", [y, weight], [at.named("normed_scan")],
            eps=c.norm_eps or g.config.norm.eps, groups=c.n_heads,
        )  # fmt: skip
        (y,) = g.call("SiluGate", [y, z], [at.named("gated")])
        return at.linear("out_proj", y, "out")

    def _unit(self, at: LayerGraph, qk: str) -> str:
        """Scale keys to length 1 and queries to 1/sqrt(N), by RMS norms: a mean square is the
        squared length divided by N.
        """
        c, g = self.config, at.g
        root = math.sqrt(c.d_state)
        scales = [np.full(c.group_states, 1 / size, np.float32) for size in (c.d_state, root)]
        weight = at.named("qk_norm.weight")
        g.constant(weight, np.concatenate(scales))
        return g.call(
            "GroupRMSNorm", [qk, weight], [at.named("unit_qk")],
            eps=UNIT_EPS / c.d_state, groups=2 * c.n_groups,
        )[0]  # fmt: skip

    def _scan(self, at: LayerGraph, values: dict[str, str]) -> str:
        c, g = self.config, at.g
        shape = [c.n_heads, c.head_dim, c.d_state]
        inputs = [
            *values.values(),
            g.weight(at.named("A_log"), lambda a: -np.exp(a)),
            g.weight(at.named("dt_bias")),
            g.input(at.named("ssm_state"), "f32", ["B", *shape]),
            "kept",
            "parents",
            "tree",
            "last_only",
        ]
        y, states = g.call(
            "GatedDeltaRule", inputs, [at.named("scan"), at.named("ssm_states")],
            heads=c.n_heads, head_dim=c.head_dim, groups=c.n_groups, d_state=c.d_state,
            beta_max=c.beta_max,
        )  # fmt: skip
        g.output(states, ["R", "B", *shape])
        return y


EXPORT = GatedDeltaNetExport
