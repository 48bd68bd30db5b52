"""One layer's plan: its recipe's table, with the scales that calibration gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, Mixer
from edge.errors import ExportError
from edge.export.quantize.groups import head_channel_scales, ssd_group_scales
from edge.export.quantize.how import Dynamic, Static, Table
from edge.export.quantize.names import inputs, layer_matrices, sources, usual
from edge.export.quantize.observers import scale_of
from edge.export.quantize.plan import F32 as FLOATING
from edge.export.quantize.plan import (
    INT8,
    LayerPlan,
    Product,
    Rounding,
    ScanPlan,
    StateType,
    fitting,
)
from edge.export.quantize.recipes import activation, storage
from edge.export.quantize.sites import Sites
from edge.tensors import padded_head_dim

F32 = NDArray[np.float32]
Fetch = Callable[[str], F32]

_CONSTANTS = ("conv1d", "A_log", "D", "dt_bias")


@dataclass
class LayerPlanner:
    """Plans one layer.

    Attributes:
        prefix: `layers.3`.
        fetch: canonical tensor name → fp32 array.
        state: what ssm_state is to be kept in.
    """

    prefix: str
    layer: Mixer
    d_model: int
    table: Table
    sites: Sites
    fetch: Fetch
    state: StateType = "fp32"
    _known: dict[str, Rounding] = field(default_factory=dict)

    def plan(self) -> LayerPlan:
        """Raises ExportError when the layer cannot keep its state as wanted."""
        scan = None
        if isinstance(self.layer, Mamba1Config):
            scan = self._scan(self._mamba1_sites(self.layer))
        elif isinstance(self.layer, Mamba2Config):
            scan = self._scan(self._mamba2_sites(self.layer))
        return LayerPlan({name: self._product(name) for name in inputs(self.layer)}, scan)

    # -- products ---------------------------------------------------------------------------------

    def _product(self, matrix: str) -> Product:
        value = inputs(self.layer)[matrix]
        columns = layer_matrices(self.layer, self.d_model)[matrix][1]
        wanted = storage(self.table, usual(matrix), FLOATING)
        kept = fitting(wanted, columns)
        how = activation(self.table, usual(value))
        if how is None or wanted.bits > 8:
            return Product(kept)
        if kept.bits > 8:
            kept = INT8
        if matrix in self._known:
            return Product(kept, self._known[matrix])
        if isinstance(how, Dynamic):
            if kept.block is not None:
                raise TypeError(f"{matrix}: no op multiplies blocks by what has a scale a token")
            return Product(kept, Rounding(None))
        seen = self.sites.seen(self._value(value), how)
        rounding, outliers = self.sites.rounding(seen, how, lambda: self._columns(matrix))
        return Product(kept, rounding, outliers)

    def _columns(self, matrix: str) -> F32:
        """The matrix's largest magnitude in each column, [1, K]."""
        rows = [self.fetch(f"{self.prefix}.{name}.weight") for name in sources(matrix)]
        largest = np.abs(np.concatenate([np.abs(w).max(0, keepdims=True) for w in rows])).max(0)
        if isinstance(self.layer, AttentionConfig) and matrix == "o_proj":
            heads, wide = self.layer.n_heads, padded_head_dim(self.layer.head_dim)
            padded = np.zeros((heads, wide), np.float32)
            padded[:, : self.layer.head_dim] = largest.reshape(heads, -1)
            largest = padded.reshape(-1)
        return largest[None]

    # -- sites of a scan --------------------------------------------------------------------------

    def _value(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def _site(self, name: str, matrix: str = "") -> Rounding | None:
        """How a value of the table is rounded as a whole; `matrix` also reads it."""
        how = activation(self.table, name)
        if how is None:
            return None
        if isinstance(how, Dynamic):
            return Rounding(None)
        seen = self.sites.seen(self._value(name), how)
        if how.groups:
            return self.sites.given(seen, how, self._group_scales(name, seen.channels))
        rounding, _ = self.sites.rounding(seen, how, lambda: self._columns(matrix))
        if matrix:
            self._known[matrix] = rounding
        return rounding

    def _group_scales(self, name: str, channels: F32) -> F32:
        assert isinstance(self.layer, Mamba2Config)
        if name == "x":
            return head_channel_scales(channels, self.layer.n_heads, self.layer.n_groups)
        return ssd_group_scales(channels, self.layer.n_groups)

    def _mamba1_sites(self, layer: Mamba1Config) -> dict[str, Rounding | None]:
        both = self._site("xz")
        low, rest = self._dbc(layer)
        if low is not None:
            self._known["dt_proj"] = low
        x = self._site("conv", "x_proj")
        return {"conv_in": both, "z": both, "x": x, "B": rest, "C": rest, "dt": self._site("dt")}

    def _dbc(self, layer: Mamba1Config) -> tuple[Rounding | None, Rounding | None]:
        """(how dt of low rank is rounded, how B and C are): alike, unless dt is smoothed."""
        how = activation(self.table, "dbc")
        if not isinstance(how, Static) or how.smooth is None:
            site = self._site("dbc")
            return site, site
        value, rank = self._value("dbc"), layer.dt_rank
        seen = self.sites.seen(value, how, slice(0, rank), f"{value}[dt]")
        low, _ = self.sites.rounding(seen, how, lambda: self._columns("dt_proj"))
        seen = self.sites.seen(value, how, slice(rank, None), f"{value}[B,C]")
        rest, _ = self.sites.rounding(seen, Static())
        return low, rest

    def _mamba2_sites(self, layer: Mamba2Config) -> dict[str, Rounding | None]:
        sites = {name: self._site(name) for name in ("z", "dt", "x", "B", "C")}
        return {"conv_in": self._before_conv(layer), **sites}

    def _before_conv(self, layer: Mamba2Config) -> Rounding | None:
        """x, B and C, which the convolution takes side by side: a scale each."""
        how = activation(self.table, "xBC")
        if not isinstance(how, Static):
            return self._site("xBC")
        value, start, scales = self._value("xBC"), 0, []
        shares = layer.n_groups * layer.d_state
        for name, width in (("x", layer.d_ssm), ("B", shares), ("C", shares)):
            seen = self.sites.seen(value, how, slice(start, start + width), f"{value}[{name}]")
            rounding, _ = self.sites.rounding(seen, how)
            assert rounding.scale is not None
            scales.append(np.broadcast_to(rounding.scale, width))
            start += width
        return Rounding(np.concatenate(scales))

    # -- the scan ---------------------------------------------------------------------------------

    def _scan(self, found: dict[str, Rounding | None]) -> ScanPlan | None:
        sites = {name: site for name, site in found.items() if site is not None}
        constants = frozenset(n for n in _CONSTANTS if storage(self.table, n, FLOATING).int8)
        hindrance = self._hindrance(sites, constants)
        if self.state != "fp32" and hindrance:
            raise ExportError(
                f"ssm_state cannot be {self.state}: {hindrance}",
                field=self.prefix,
                remedy="--ssm-state fp32, or another recipe for this kind of layer (--layers)",
            )
        if not sites and not constants:
            return None
        scale = self._state_scale() if self.state == "int8" else None
        return ScanPlan(not hindrance, sites, constants, self.state, scale)

    def _hindrance(self, sites: dict[str, Rounding], constants: frozenset[str]) -> str:
        """Why the layer cannot run on int8 ops throughout; empty when it can."""
        layer = self.layer
        assert isinstance(layer, Mamba1Config | Mamba2Config)
        if len(sites) < 6 or len(constants) < len(_CONSTANTS):
            return "its recipe leaves the scan floating"
        if not all(site.plain for site in sites.values()):
            return "its recipe rotates values of the scan, or finds their scales at run time"
        if layer.proj_bias:
            return "its projections have biases"
        if isinstance(layer, Mamba2Config) and layer.d_mlp:
            return "a part of it is an MLP (d_ssm is less than d_inner)"
        for matrix in inputs(layer):
            if matrix != "out_proj" and not self._integer(matrix):
                return f"{matrix} is no integer product with a scale known beforehand"
        return ""

    def _integer(self, matrix: str) -> bool:
        """Whether the recipe makes a matrix an integer product with a static input."""
        how = activation(self.table, inputs(self.layer)[matrix])
        static = isinstance(how, Static) and how.outliers is None
        kept = storage(self.table, matrix, FLOATING)
        return static and (kept.int8 or kept.bits == 4)

    def _state_scale(self) -> F32:
        """Of an int8 state: [N, 1] of Mamba-1, [H, 1, N] of Mamba-2."""
        seen = self.sites.seen(self._value("ssm_states"), Static())
        scale = scale_of(seen.channels).reshape(seen.channels.shape)
        self.sites.given(seen, Static(), scale.reshape(-1))
        return scale[..., None] if scale.ndim == 1 else scale[:, None]
