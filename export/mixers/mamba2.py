"""Mamba-2 (Mamba-2, section 7 and figure 6)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge.export.mixers.base import Conv1d, Scale, State, initial
from edge.export.mixers.mamba import (
    MambaExport,
    Sites,
    constant,
    constant_int8,
    initial_dt_bias,
    is_fused,
    site_scale,
)
from edge.export.nodes.layer import LayerGraph, joined
from edge.export.nodes.products import ProductInput, scale_of
from edge.export.quantize.layer_plan import LayerPlanner, Matrix, activation
from edge.export.quantize.plan import LayerPlan, Rounding, Static
from edge.export.quantize.scales import head_channel_scales, ssd_group_scales
from edge.export.training_ops import gated_rms_norm_training, selective_scan_heads_chunked
from edge.mixers.mamba2 import Mamba2Config
from edge.plugins.gated_norm.reference import gated_rms_norm
from edge.plugins.group_norm.reference import group_rms_norm
from edge.plugins.selective_scan_heads.reference import selective_scan_heads

CHUNK, GPU_CHUNK = 32, 128  # tokens; a GPU takes longer to start small products than to run them


class Mamba2(nn.Module):
    def __init__(self, config: Mamba2Config, d_model: int, eps: float) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.in_proj = nn.Linear(d_model, config.in_proj_rows, bias=config.proj_bias)
        self.conv1d = Conv1d(config.conv_channels, config.d_conv, config.conv_bias)
        heads = config.n_heads
        self.dt_bias = initial(lambda: initial_dt_bias(heads), heads)
        self.A_log = initial(lambda: torch.log(torch.empty(heads).uniform_(1, 16)), heads)
        self.D = nn.Parameter(torch.ones(config.n_heads))
        if config.gated_norm:
            self.gated_norm = Scale(config.d_ssm)
        self.out_proj = nn.Linear(config.d_inner, d_model, bias=config.proj_bias)

    def forward(self, u: Tensor, state: State, position: int) -> tuple[Tensor, State]:
        c = self.config
        sizes = [c.d_mlp, c.d_mlp, c.d_ssm, c.conv_channels, c.n_heads]
        z0, x0, z, xBC, dt = self.in_proj(u).split(sizes, dim=-1)
        xBC, conv_state = self.conv1d(xBC, state["conv_state"])
        x, B, C = xBC.split([c.d_ssm, c.group_states, c.group_states], dim=-1)
        args = (
            x.unflatten(-1, (c.n_heads, c.head_dim)), dt, self.A_log,
            B.unflatten(-1, (c.n_groups, c.d_state)), C.unflatten(-1, (c.n_groups, c.d_state)),
            self.D, self.dt_bias, state["ssm_state"], c.dt_limit,
        )  # fmt: skip
        if u.shape[1] < CHUNK:
            y, ssm_state = selective_scan_heads(*args)
        else:
            chunk = GPU_CHUNK if u.is_cuda else CHUNK
            y, ssm_state = selective_scan_heads_chunked(*args, chunk=chunk)
        y = y.flatten(-2)
        if c.gated_norm and c.norm_before_gate:
            y = group_rms_norm(y, self.gated_norm.weight, self.eps, c.n_groups) * F.silu(z)
        elif c.gated_norm:
            training = torch.is_grad_enabled()
            norm = gated_rms_norm_training if training else gated_rms_norm
            y = norm(y, z, self.gated_norm.weight, self.eps, c.n_groups)
        else:
            y = y * F.silu(z)
        if c.d_mlp:
            y = torch.cat([F.silu(z0) * x0, y], dim=-1)
        return self.out_proj(y), {"conv_state": conv_state, "ssm_state": ssm_state}


class Mamba2Export(MambaExport[Mamba2Config]):
    """Mamba-2's export: x, B and C are convolved together, and the gate is part of the norm."""

    state_axes: ClassVar[tuple[int, ...]] = (-3, -1)
    listed: ClassVar[tuple[str, ...]] = ("xBC", "z", "x", "dt", "B", "C")

    @property
    def conv_parts(self) -> tuple[int, ...]:
        return (self.config.d_ssm, self.config.group_states, self.config.group_states)

    @property
    def _conv_widths(self) -> dict[str, int]:
        return dict(zip("xBC", self.conv_parts, strict=True))

    def module(self, d_model: int, eps: float) -> Mamba2:
        return Mamba2(self.config, d_model, eps)

    def matrices(self, d_model: int) -> dict[str, Matrix]:
        c = self.config
        reads, listed = ("joined", "gated") if c.d_mlp else ("gated", "")
        return {
            "in_proj": Matrix(c.in_proj_rows, d_model, "normed"),
            "out_proj": Matrix(d_model, c.d_inner, reads, reads_listed=listed),
        }

    def walks(self, plan: LayerPlan) -> bool:
        return is_fused(plan)

    def logs(self, plan: LayerPlan) -> bool:
        """Return whether its scan replays logged tokens: only if ssm_state is not rounded."""
        return not is_fused(plan) or (plan.scan is not None and plan.scan.state == "fp32")

    def form_hindrance(self) -> str:
        mlp_reason = (
            "part of it is an MLP (d_ssm is less than d_inner)" if self.config.d_mlp else ""
        )
        return super().form_hindrance() or mlp_reason

    def sites(self, planner: LayerPlanner) -> Sites:
        c = self.config
        sites = {name: planner.site(name) for name in ("z", "dt")}
        sites["x"] = planner.site(
            "x", grouped=lambda seen: head_channel_scales(seen.channels, c.n_heads, c.n_groups)
        )
        for name in "BC":
            sites[name] = planner.site(
                name, grouped=lambda seen: ssd_group_scales(seen.channels, c.n_groups)
            )
        return {"conv_in": self._conv_in_rounding(planner), **sites}

    def _conv_in_rounding(self, planner: LayerPlanner) -> Rounding | None:
        """Round x, B and C, side by side before the convolution, by separate scales."""
        how = activation(planner.table, "xBC")
        if not isinstance(how, Static):
            return planner.site("xBC")
        value, start, scales = planner.value("xBC"), 0, []
        for name, width in self._conv_widths.items():
            seen = planner.sites.seen(value, how, slice(start, start + width), f"{value}[{name}]")
            rounding, _ = planner.sites.rounding(seen, how)
            assert rounding.scale is not None
            scales.append(np.broadcast_to(rounding.scale, width))
            start += width
        return Rounding(np.concatenate(scales))

    def _attributes(self) -> dict[str, float]:
        """Return the attributes of `SelectiveScanHeads` and its int8 form."""
        c = self.config
        low, high = c.dt_limit
        return {
            "heads": c.n_heads,
            "head_dim": c.head_dim,
            "groups": c.n_groups,
            "d_state": c.d_state,
            "dt_min": float(low),
            "dt_max": float(high),
        }

    def floating(self, at: LayerGraph, u: ProductInput) -> str:
        c, g, wide = self.config, at.g, self.config.d_ssm
        projected = at.linear("in_proj", u, "zxbcdt", c.proj_bias)
        parts = {"z": wide, "xBC": c.conv_channels, "dt": c.n_heads}
        if c.d_mlp:
            parts = {"z0": c.d_mlp, "x0": c.d_mlp, **parts}
        *mlp, z, xbc, dt = at.split(projected, parts)
        values = {"z": at.site("z", z, wide), "dt": at.site("dt", dt, c.n_heads)}
        xbc = self.convolution(at, at.site("conv_in", xbc, c.conv_channels))
        convolved = at.split(xbc, self._conv_widths)
        for (name, width), value in zip(self._conv_widths.items(), convolved, strict=True):
            values[name] = at.site(name, value, width)
        y = self._scan(at, values)
        if c.gated_norm and not c.norm_before_gate:
            weight = g.weight(at.named("gated_norm.weight"))
            settings = {"eps": g.config.norm.eps, "groups": c.n_groups}
            (y,) = g.call("GatedRMSNorm", [y, values["z"], weight], [at.named("gated")], **settings)
        else:
            y = self._norm_and_gate(at, y, values["z"])
        if mlp:
            z0, x0 = mlp
            (gated_mlp,) = g.call("SiluGate", [x0, z0], [at.named("side")])
            y = g.node("Concat", [gated_mlp, y], at.named("joined"), axis=-1)
        return at.linear("out_proj", y, "out", c.proj_bias)

    def _scan(self, at: LayerGraph, values: dict[str, str]) -> str:
        c, g = self.config, at.g
        shape = [c.n_heads, c.head_dim, c.d_state]
        inputs = [
            *(values[name] for name in ("x", "dt", "B", "C")),
            constant(at, "A_log", after=lambda a: -np.exp(a)),
            constant(at, "D"),
            constant(at, "dt_bias"),
            g.input(at.named("ssm_state"), "f32", ["B", *shape]),
            "stored",
            "paths",
            *self.log_inputs(at, values, {"x": "f32", "dt": "f32", "B": "f32"}),
        ]
        outputs = [at.named("scan"), at.named("ssm_states")]
        y, states = g.call("SelectiveScanHeads", inputs, outputs, **self._attributes())
        g.output(states, ["S", "B", *shape])
        return y

    def fused(self, at: LayerGraph, u: ProductInput) -> str:
        c, wide = self.config, self.config.d_ssm
        parts = {"z": wide, "conv_in": c.conv_channels, "dt": c.n_heads}
        scales = joined(*((site_scale(at, site), width) for site, width in parts.items()))
        scale = scale_of(at.g, at.named("zxbcdt.scale"), scales)
        projected = at.linear_to_int8("in_proj", u, "zxbcdt.q", scale)
        z, xbc, dt = at.split(
            projected, {"z.q": wide, "xBC.q": parts["conv_in"], "dt.q": parts["dt"]}
        )
        widths = self._conv_widths
        conv_scale = joined(*((site_scale(at, site), width) for site, width in widths.items()))
        xbc = self.convolution_int8(at, xbc, conv_scale)
        x, b, c_ = at.split(xbc, {f"{site}.q": width for site, width in widths.items()})
        constants = [
            *constant_int8(at, "A_log"), *constant_int8(at, "D"), *constant_int8(at, "dt_bias")
        ]  # fmt: skip
        values = {"x": x, "dt": dt, "B": b, "C": c_}
        y = self.scan_int8(at, "SelectiveScanHeadsInt8", values, constants, **self._attributes())
        return at.linear("out_proj", self._gate(at, y, z), "out")

    def _gate(self, at: LayerGraph, y: str, z: str) -> str:
        g = at.g
        scale = scale_of(g, at.named("z.scale"), site_scale(at, "z"))
        if not self.config.gated_norm or self.config.norm_before_gate:
            (z,) = g.call("Dequantize", [z, scale], [at.named("z")])
            return self._norm_and_gate(at, y, z)
        inputs = [y, z, scale, g.weight(at.named("gated_norm.weight"))]
        settings = {"eps": g.config.norm.eps, "groups": self.config.n_groups}
        return g.call("GatedRMSNormInt8", inputs, [at.named("gated")], **settings)[0]

    def _norm_and_gate(self, at: LayerGraph, y: str, z: str) -> str:
        """Add y·silu(z), with y normed first where there is a norm."""
        g = at.g
        if self.config.gated_norm:
            inputs = [y, g.weight(at.named("gated_norm.weight"))]
            settings = {"eps": g.config.norm.eps, "groups": self.config.n_groups}
            (y,) = g.call("GroupRMSNorm", inputs, [at.named("normed_scan")], **settings)
        return g.call("SiluGate", [y, z], [at.named("gated")])[0]


EXPORT = Mamba2Export
