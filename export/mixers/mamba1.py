"""Mamba-1 (Mamba, figure 3 and algorithm 2)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from edge.export.mixers.base import Conv1d, Scale, State, Stored, initial
from edge.export.mixers.mamba import (
    MambaExport,
    Sites,
    constant,
    constant_int8,
    initial_dt_bias,
    site_scale,
)
from edge.export.nodes.layer import LayerGraph, joined
from edge.export.nodes.products import ProductInput, input_scale, scale_of
from edge.export.quantize.layer_plan import LayerPlanner, Matrix, activation
from edge.export.quantize.plan import LayerPlan, Rounding, Static
from edge.export.training_ops import rms_norm_training, selective_scan_training
from edge.mixers.mamba1 import Mamba1Config
from edge.plugins.norm.reference import rms_norm
from edge.plugins.selective_scan.reference import selective_scan

CHUNK = 8  # tokens; for fewer, the reference takes no longer
_NORMS = ("dt_norm", "B_norm", "C_norm")


class Mamba1(nn.Module):
    def __init__(self, config: Mamba1Config, d_model: int) -> None:
        super().__init__()
        self.config = config
        inner, state, rank = config.d_inner, config.d_state, config.dt_rank
        d_in = d_model if config.reads_input else inner
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=config.proj_bias)
        self.conv1d = Conv1d(inner, config.d_conv, config.conv_bias)
        self.x_proj = nn.Linear(d_in, sum(config.x_proj_parts), bias=False)
        if config.inner_eps is not None:
            self.dt_norm, self.B_norm, self.C_norm = Scale(rank), Scale(state), Scale(state)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = initial(
            lambda: torch.log(torch.arange(1.0, state + 1)).repeat(inner, 1), inner, state
        )
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, d_model, bias=config.proj_bias)
        self.dt_proj.bias = initial(lambda: initial_dt_bias(inner), inner)

    def forward(self, u: Tensor, state: State, position: int) -> tuple[Tensor, State]:
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x, conv_state = self.conv1d(x, state["conv_state"])
        c = self.config
        dt, B, C = self.x_proj(u if c.reads_input else x).split(c.x_proj_parts, dim=-1)
        if c.inner_eps is not None:
            norm = rms_norm_training if torch.is_grad_enabled() else rms_norm
            dt = norm(dt, self.dt_norm.weight, c.inner_eps)
            B = norm(B, self.B_norm.weight, c.inner_eps)
            C = norm(C, self.C_norm.weight, c.inner_eps)
        scan = selective_scan if u.shape[1] < CHUNK else selective_scan_training
        y, ssm_state = scan(
            x, dt @ self.dt_proj.weight.T, self.A_log, B, C, self.D, self.dt_proj.bias, z,
            state["ssm_state"],
        )  # fmt: skip
        return self.out_proj(y), {"conv_state": conv_state, "ssm_state": ssm_state}


class Mamba1Export(MambaExport[Mamba1Config]):
    state_axes: ClassVar[tuple[int, ...]] = (-2,)
    listed: ClassVar[tuple[str, ...]] = ("xz", "conv", "dbc", "dt")

    @property
    def conv_parts(self) -> tuple[int, ...]:
        return (self.config.d_inner,)

    @property
    def _groups(self) -> str:
        """The suffix of its ops' names."""
        return "Groups" if self.config.C_groups > 1 else ""

    def module(self, d_model: int, eps: float) -> Mamba1:
        return Mamba1(self.config, d_model)

    def matrices(self, d_model: int) -> dict[str, Matrix]:
        c = self.config
        inner, rank = c.d_inner, c.dt_rank
        reads = (d_model, "normed") if c.reads_input else (inner, "conv")
        return {
            "in_proj": Matrix(2 * inner, d_model, "normed"),
            "x_proj": Matrix(sum(c.x_proj_parts), *reads),
            "dt_proj": Matrix(inner, rank, "dbc"),
            "out_proj": Matrix(d_model, inner, "scan"),
        }

    def walks(self, plan: LayerPlan) -> bool:
        return True

    def sites(self, planner: LayerPlanner) -> Sites:
        xz = planner.site("xz")
        low, rest = self._dbc_rounding(planner)
        if low is not None:
            planner.known["dt_proj"] = low
        reads_input = self.config.reads_input
        x = planner.site("conv", "" if reads_input else "x_proj")
        if reads_input and (normed := planner.site("normed", "in_proj")) is not None:
            planner.known["x_proj"] = normed
        dt = planner.site("dt")
        return {"conv_in": xz, "z": xz, "x": x, "B": rest, "C": rest, "dt": dt}

    def _dbc_rounding(self, planner: LayerPlanner) -> tuple[Rounding | None, Rounding | None]:
        """Return the rounding of low-rank dt, and of B and C: the same unless dt is smoothed."""
        how = activation(planner.table, "dbc")
        if not isinstance(how, Static) or how.smooth is None:
            site = planner.site("dbc")
            return site, site
        sites, value, rank = planner.sites, planner.value("dbc"), self.config.dt_rank
        seen = sites.seen(value, how, slice(0, rank), f"{value}[dt]")
        low, _ = sites.rounding(seen, how, lambda: planner.column_absmax("dt_proj"))
        seen = sites.seen(value, how, slice(rank, None), f"{value}[B,C]")
        rest, _ = sites.rounding(seen, Static())
        return low, rest

    def floating(self, at: LayerGraph, u: ProductInput) -> str:
        c, g = self.config, at.g
        inner, n, (rank, b_width, c_width) = c.d_inner, c.d_state, c.x_proj_parts
        xz = at.linear("in_proj", u, "xz", c.proj_bias)
        x, z = at.split(xz, {"x": inner, "z": inner})
        x, z = at.site("conv_in", x, inner), at.site("z", z, inner)
        conv = self.convolution(at, x)
        x = at.site("x", conv, inner)
        dbc = self._dbc_normed(at, u if c.reads_input else conv)
        low, b, c_ = at.split(dbc, {"low_rank_dt": rank, "B": b_width, "C": c_width})
        b, c_ = at.site("B", b, b_width), at.site("C", c_, c_width)
        dt = at.linear("dt_proj", low, "dt")
        inputs = [
            x, at.site("dt", dt, inner), b, c_, z,
            constant(at, "A_log", np.transpose, after=lambda a: -np.exp(a)),
            constant(at, "D"),
            constant(at, "dt_proj.bias"),
            g.input(at.named("ssm_state"), "f32", ["B", n, inner]),
            "kept", "parents", "tree", "last_only",
        ]  # fmt: skip
        names = [at.named("scan"), at.named("ssm_states")]
        y, states = g.call(f"SelectiveScan{self._groups}", inputs, names)
        g.output(states, ["R", "B", n, inner])
        return at.linear("out_proj", y, "out", c.proj_bias)

    def _dbc_normed(self, at: LayerGraph, x: ProductInput | str) -> str:
        """Return low-rank dt, B and C side by side, each normed where the layer has norms."""
        c = self.config
        if c.inner_eps is None:
            return at.linear("x_proj", x, "dbc")
        raw = at.linear("x_proj", x, "projected")
        parts = [at.tensor(f"{name}.weight") for name in _NORMS]
        weight = at.g.constant(at.named("dbc_norm.weight"), np.concatenate(parts))
        settings = {"eps": c.inner_eps, "first": c.dt_rank}
        return at.g.call("PartsRMSNorm", [raw, weight], [at.named("dbc")], **settings)[0]

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        module, _, _ = name.partition(".")
        if module not in _NORMS:
            return super().stored(name, shape)
        rank, n = self.config.dt_rank, self.config.d_state
        start = (0, rank, rank + n)[_NORMS.index(module)]
        return Stored("dbc_norm.weight", (rank + 2 * n,), lambda w: w[start : start + shape[0]])

    def fused(self, at: LayerGraph, u: ProductInput) -> str:
        """Add the mixer in int8 ops; the convolution's rounded output feeds the scan and x_proj."""
        g, c = at.g, self.config
        inner, (rank, b_width, c_width) = c.d_inner, c.x_proj_parts
        xz_scale = joined((site_scale(at, "conv_in"), inner), (site_scale(at, "z"), inner))
        xz = at.linear_to_int8("in_proj", u, "xz.q", scale_of(g, at.named("xz.scale"), xz_scale))
        x, z = at.split(xz, {"x.q": inner, "z.q": inner})
        x = self.convolution_int8(at, x, site_scale(at, "x"))
        dbc = self._dbc_normed(at, u if c.reads_input else ProductInput(rounded=x))
        low_scale = input_scale(at.plan.products["dt_proj"], rank)
        dbc_scale = joined(
            (low_scale, rank), (site_scale(at, "B"), b_width), (site_scale(at, "C"), c_width)
        )
        scale = scale_of(g, at.named("dbc.scale"), dbc_scale)
        (dbc,) = g.call("Quantize", [dbc, scale], [at.named("dbc.q")])
        low, b, c_ = at.split(dbc, {"low_rank_dt.q": rank, "B.q": b_width, "C.q": c_width})
        dt_scale = scale_of(g, at.named("dt.scale"), site_scale(at, "dt"))
        dt = at.linear_to_int8("dt_proj", ProductInput(rounded=low), "dt.q", dt_scale)
        constants = [
            *constant_int8(at, "A_log", np.transpose),
            *constant_int8(at, "D"),
            *constant_int8(at, "dt_proj.bias"),
        ]
        values = {"x": x, "dt": dt, "B": b, "C": c_, "z": z}
        y = self.scan_int8(at, f"SelectiveScan{self._groups}Int8", values, constants)
        return at.linear("out_proj", y, "out")


EXPORT = Mamba1Export
