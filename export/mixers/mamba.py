"""Code shared by Mamba-1 and Mamba-2: the convolution, small weights, and int8 values.

A layer is fused when calibrated scales round all its values: it then runs on int8 ops from one
projection to the other (Quamba, figure 4). Any other layer runs on floating ops and fake-quantized
values, which are the same numbers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from edge.export.mixers.base import Array, MixerExport, Stored
from edge.export.nodes.builder import F32
from edge.export.nodes.layer import LayerGraph, joined
from edge.export.nodes.products import ProductInput, scale_of
from edge.export.quantize import plan as plans
from edge.export.quantize.layer_plan import LayerPlanner, Matrix, activation, storage
from edge.export.quantize.observers import scale_of as scale_for
from edge.export.quantize.plan import LayerPlan, Rounding, ScanPlan, Static, Table
from edge.export.quantize.weights import I8, dequantize_int8, quantize_int8
from edge.launch import DType
from edge.mixers.base import MixerConfig
from edge.mixers.mamba1 import Mamba1Config
from edge.mixers.mamba2 import Mamba2Config

M = TypeVar("M", Mamba1Config, Mamba2Config)
Change = Callable[[F32], F32]
Sites = dict[str, Rounding | None]

_STATES = {"fp32": ("f32", 32), "fp16": ("f16", 16), "int8": ("i8", 8)}
_CONSTANTS = ("conv1d", "A_log", "D", "dt_bias")
# Names of small weights in plans, where they differ.
_PLAN_NAMES = {"conv1d.weight": "conv1d", "conv1d.bias": "conv1d", "dt_proj.bias": "dt_bias"}


def initial_dt_bias(size: int) -> Tensor:
    """Return the inverse softplus of Δ, log-uniform in [0.001, 0.1] (Mamba, section 3.6)."""
    low, high = 1e-3, 1e-1
    delta = torch.exp(torch.rand(size) * (math.log(high) - math.log(low)) + math.log(low))
    return delta + torch.log(-torch.expm1(-delta))


class MambaExport(MixerExport[M]):
    """A selective SSM behind a convolution.

    Attributes:
        listed: names by which a recipe's table lists the values of `sites`.
    """

    listed: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def conv_parts(self) -> tuple[int, ...]:
        """Channels of the tensors that are convolved together: x, and Mamba-2's B and C.

        Each has its own scales, as in Quamba2's code: one scale per tensor.
        """

    # -- plan -------------------------------------------------------------------------------------

    @abstractmethod
    def sites(self, planner: LayerPlanner) -> Sites:
        """Return how conv_in, z, x, dt, B and C are rounded; None where the recipe does not say."""

    def hindrance(self, table: Table, matrices: Mapping[str, Matrix]) -> str:
        rounded = [activation(table, name) for name in self.listed]
        if None in rounded or not all(storage(table, n, plans.F32).int8 for n in _CONSTANTS):
            return "its recipe leaves the scan floating"
        if not all(isinstance(how, Static) and not how.rotate for how in rounded):
            return "its recipe rotates values of the scan, or finds their scales at run time"
        if hindrance := self.form_hindrance():
            return hindrance
        for name, matrix in matrices.items():
            how = activation(table, matrix.reads)
            static = isinstance(how, Static) and how.outliers is None
            stored = storage(table, name, plans.F32)
            if name != "out_proj" and not (static and (stored.int8 or stored.bits == 4)):
                return f"{name} is not an integer product with a calibrated scale"
        return ""

    def form_hindrance(self) -> str:
        """Return why a layer of this form cannot run on int8 ops, or "" if it can."""
        return "its projections have biases" if self.config.proj_bias else ""

    def plan(self, planner: LayerPlanner) -> LayerPlan:
        scan = self._scan_plan(planner)
        return LayerPlan(planner.products(), scan)

    def _scan_plan(self, planner: LayerPlanner) -> ScanPlan | None:
        all_sites = self.sites(planner)
        sites = {name: site for name, site in all_sites.items() if site is not None}
        constants = frozenset(n for n in _CONSTANTS if storage(planner.table, n, plans.F32).int8)
        if not sites and not constants:
            return None
        scale = _state_scale(planner) if planner.state == "int8" else None
        fused = not self.hindrance(planner.table, planner.matrices)
        return ScanPlan(fused, sites, constants, planner.state, scale)

    # -- graph ------------------------------------------------------------------------------------

    @abstractmethod
    def floating(self, at: LayerGraph, u: ProductInput) -> str:
        """Add the mixer in floating ops and return its output."""

    @abstractmethod
    def fused(self, at: LayerGraph, u: ProductInput) -> str:
        """Add the mixer in int8 ops and return its output."""

    def nodes(self, at: LayerGraph, u: ProductInput) -> str:
        return self.fused(at, u) if is_fused(at.plan) else self.floating(at, u)

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        if name == "A_log":
            return Stored(name, shape[::-1], lambda a: log_of_rate(a).T)
        return super().stored(name, shape)

    def convolution(self, at: LayerGraph, x: str) -> str:
        """Add `convolution`, with weights that may be rounded."""
        return convolution(at, self.config, x, self.conv_parts, self.config.conv_bias)

    def convolution_int8(self, at: LayerGraph, x: str, y_scale: F32) -> str:
        """Add convolution, SiLU and rounding; binds conv_state and emits its kept rows."""
        c, g = self.config, at.g
        rows, channels = c.d_conv - 1, c.conv_channels
        taps, kept_taps = at.shared.taps[c.d_conv]
        inputs = [
            x,
            scale_of(g, at.named("conv_in.scale"), site_scale(at, "conv_in")),
            g.input(at.named("conv_state"), "i8", [rows, "B", channels]),
            taps,
            kept_taps,
            *constant_int8(at, "conv1d.weight", _by_tap, self.conv_parts),
        ]
        if c.conv_bias:
            inputs += constant_int8(at, "conv1d.bias", None, self.conv_parts)
        else:
            inputs += _store_int8(at, "conv1d.bias", np.zeros(channels, np.float32))
        inputs.append(scale_of(g, at.named("conv.scale"), y_scale))
        outputs = [at.named("conv.q"), at.named("conv_states")]
        y, states = g.call("CausalConv1dInt8", inputs, outputs)
        g.output(states, ["R", rows, "B", channels], "i8")
        return y

    def scan_int8(
        self,
        at: LayerGraph,
        op: str,
        values: dict[str, str],
        constants: list[str],
        **attributes: float,
    ) -> str:
        """Add the scan over values by site name; binds ssm_state and emits its kept states."""
        g = at.g
        shape: list[int] = [*self.config.recurrent_states(1)["ssm_state"][1:]]
        dtype, bits = _STATES[at.scan.state]
        scale = at.scan.state_scale if at.scan.state == "int8" else np.ones(1, np.float32)
        assert scale is not None
        inputs = []
        for site, value in values.items():
            inputs += [value, scale_of(g, at.named(f"{site}.scale"), site_scale(at, site))]
        state_scale = at.named("ssm_state.scale")
        logged = self.logs(at.plan)
        inputs += [
            *constants,
            g.input(at.named("ssm_state"), dtype, ["B", *shape]),
            g.floats(state_scale, scale) if scale.size == 1 else g.constant(state_scale, scale),
            "stored" if logged else "kept",
            "parents",
            "tree",
            "last_only",
        ]
        if logged:
            # ONNX Runtime's function bodies hold x and B as u8
            unsigned = ("x", "B")
            types: dict[str, DType] = {s: "u8" if s in unsigned else "i8" for s in ("x", "dt", "B")}
            inputs += ["paths", *self.log_inputs(at, values, types)]
        outputs = [at.named("scan"), at.named("ssm_states")]
        y, states = g.call(op, inputs, outputs, state_bits=bits, **attributes)
        g.output(states, ["S" if logged else "R", "B", *shape], dtype)
        return y

    def log_inputs(
        self, at: LayerGraph, values: dict[str, str], types: dict[str, DType]
    ) -> list[str]:
        """Declare the inputs that feed earlier tokens' values back to the scan, one per site in
        `types`."""
        widths = self.config.log_widths()
        return [
            at.g.log(values[site], widths[f"scan_{site}"], dtype) for site, dtype in types.items()
        ]


def convolution(
    at: LayerGraph,
    config: MixerConfig,
    x: str,
    parts: Sequence[int] = (),
    bias: bool = False,
    op: str = "CausalConv1d",
) -> str:
    """Add a causal convolution, by default with SiLU; binds conv_state and emits its kept rows.

    `parts` are as in `constant_int8`.
    """
    width, channels = config.conv_width, config.conv_channels
    assert width is not None
    g, rows = at.g, width - 1
    state = g.input(at.named("conv_state"), "f32", [rows, "B", channels])
    weight = constant(at, "conv1d.weight", _by_tap, parts)
    bias_name = at.named("conv1d.bias")
    if bias:
        constant(at, "conv1d.bias", None, parts)
    else:
        g.constant(bias_name, np.zeros(channels, np.float32))
    taps, kept_taps = at.shared.taps[width]
    y, states = g.call(
        op,
        [x, state, taps, kept_taps, weight, bias_name],
        [at.named("conv"), at.named("conv_states")],
    )
    g.output(states, ["R", rows, "B", channels])
    return y


def is_fused(plan: LayerPlan) -> bool:
    """Return whether the layer runs on int8 ops throughout."""
    return plan.scan is not None and plan.scan.fused


def site_scale(at: LayerGraph, site: str) -> F32:
    """Return the calibrated scale of a fused layer's site."""
    scale = at.scan.sites[site].scale
    assert scale is not None
    return scale


def constant(
    at: LayerGraph,
    name: str,
    change: Change | None = None,
    parts: Sequence[int] = (),
    after: Change | None = None,
) -> str:
    """Store a small weight as fp32, rounded to int8 values where the plan says so.

    `change` is applied before rounding, `after` to the rounded values. `parts` are as in
    `constant_int8`.
    """

    def make(array: F32) -> F32:
        array = array if change is None else change(array)
        if at.plan.scan is not None and _PLAN_NAMES.get(name, name) in at.plan.scan.constants:
            array = dequantize_int8(*_round(array, parts))
        return array if after is None else after(array)

    return at.g.weight(at.named(name), make)


def constant_int8(
    at: LayerGraph, name: str, change: Change | None = None, parts: Sequence[int] = ()
) -> list[str]:
    """Store a small weight in int8. Returns the names of the weight and of its scale, [1] or [C].

    `parts` are the widths of the parts of the last axis that have separate scales.
    """
    array = at.tensor(name)
    return _store_int8(at, name, array if change is None else change(array), parts)


def _store_int8(at: LayerGraph, name: str, array: F32, parts: Sequence[int] = ()) -> list[str]:
    quants, scale = _round(array, parts)
    full = at.named(name)
    return [at.g.raw(full, quants), scale_of(at.g, f"{full}.scale", scale)]


def _round(array: F32, parts: Sequence[int]) -> tuple[I8, F32]:
    if len(parts) < 2:
        return quantize_int8(array)
    pieces = np.split(array, np.cumsum(parts)[:-1], axis=-1)
    rounded = [quantize_int8(piece) for piece in pieces]
    scale = joined(*((scale, width) for (_, scale), width in zip(rounded, parts, strict=True)))
    return np.concatenate([quants for quants, _ in rounded], -1), scale


def _state_scale(planner: LayerPlanner) -> F32:
    """Return the scales of an int8 state: [N, 1] for Mamba-1, [H, 1, N] for Mamba-2."""
    seen = planner.sites.seen(planner.value("ssm_states"), Static())
    scale = scale_for(seen.channels).reshape(seen.channels.shape)
    planner.sites.given(seen, Static(), scale.reshape(-1))
    return scale[..., None] if scale.ndim == 1 else scale[:, None]


def _by_tap(weight: F32) -> F32:
    """Transpose a convolution's weight [C, K] to [K, 1, C]."""
    return weight.T[:, None, :]


def log_of_rate(a: Array) -> Array:
    """Return A_log, the float nearest to ln(-A), computed in double precision."""
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN and infinity are refused later
        return np.log(-a.astype(np.float64)).astype(np.float32)
