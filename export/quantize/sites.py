"""Choose how activations are rounded from calibration statistics, and record the choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError
from edge.export.quantize.observers import Calibration, scale_of
from edge.export.quantize.plan import Rounding, Static
from edge.export.quantize.scales import smoothing
from edge.plugins.hadamard.matrices import rotation_blocks

F32 = NDArray[np.float32]
# At most 1/16 of an activation's columns stay floating: with more, int8 would save little.
_OUTLIER_DIVISOR = 16
# Channels of this many times the median are outliers whatever the threshold. Norms leave SmolLM2's
# values far below LLM.int8's 6, and yet large ones hurt a single static scale.
_OUTLIER_MEDIANS = 3.0


@dataclass(frozen=True)
class SeenRange:
    """Calibrated range of a value, or of some of its channels.

    Attributes:
        name: name for messages and the record.
        channels: f32 [C], largest magnitude of each channel.
        limit: clip → largest magnitude kept.
        clipped: scale → share of the values that saturate.
    """

    name: str
    channels: F32
    limit: Callable[[str], float]
    clipped: Callable[[float], float]


@dataclass
class Sites:
    """Chooses the rounding of activations, one call per site, and keeps each in `record`."""

    calibration: Calibration | None
    percentile: float
    record: dict[str, Any] = field(default_factory=dict)

    def seen(self, value: str, how: Static, part: slice = slice(None), name: str = "") -> SeenRange:
        """Return the range of the channels `part` of a value of the fp32 graph.

        A part can only be clipped by absmax: histograms cover whole values.
        """
        if self.calibration is None:
            raise ExportError(
                f"the scale of {value} must be calibrated", field="calibrate",
                remedy="export with --calibrate FILE",
            )  # fmt: skip
        statistics = self.calibration.statistics(value, how.rotate)
        channels = statistics.channel_absmax[part]

        def limit(clip: str) -> float:
            if clip == "absmax":
                return float(channels.max(initial=0))
            if channels.size != statistics.channel_absmax.size:
                raise TypeError(f"{value} can only be clipped as a whole")
            return statistics.octav() if clip == "octav" else statistics.percentile(self.percentile)

        return SeenRange(name or value, channels, limit, statistics.clipped)

    def rounding(
        self, seen: SeenRange, how: Static, column_absmax: Callable[[], F32] | None = None
    ) -> tuple[Rounding, tuple[int, ...]]:
        """Return how a site is rounded, and the columns that stay floating.

        `column_absmax` gives the largest weight of each column of the product that reads the site.
        """
        if how.outliers is not None:
            return self._with_outliers(seen, how, how.outliers)
        if how.smooth is not None:
            if column_absmax is None:
                raise TypeError(f"{seen.name} is smoothed, but no product reads it")
            divisor = smoothing(seen.channels, column_absmax(), how.smooth)
            scale = divisor * self._scale(seen, float((seen.channels / divisor).max()))
        else:
            scale = self._scale(seen, seen.limit(how.clip))
        self._record_site(seen, scale, how)
        return Rounding(scale, how.rotate), ()

    def given(self, seen: SeenRange, how: Static, scale: F32) -> Rounding:
        """Record a site whose scales the caller found, and return its rounding."""
        self._record_site(seen, scale, how)
        return Rounding(scale, how.rotate)

    def _with_outliers(
        self, seen: SeenRange, how: Static, threshold: float
    ) -> tuple[Rounding, tuple[int, ...]]:
        order = np.argsort(-seen.channels, kind="stable")
        maximum = seen.channels.size // _OUTLIER_DIVISOR
        threshold = min(threshold, _OUTLIER_MEDIANS * float(np.median(seen.channels)))
        chosen = sorted(int(i) for i in order[:maximum] if seen.channels[i] >= threshold)
        rest = np.delete(seen.channels, chosen)
        scale = self._scale(seen, float(rest.max(initial=0)))
        self._record_site(seen, scale, how)
        if chosen:
            self.record[seen.name]["floating_columns"] = len(chosen)
        return Rounding(scale), tuple(chosen)

    def _scale(self, seen: SeenRange, limit: float) -> F32:
        if not np.isfinite(limit) or limit <= 0:
            raise ExportError(
                f"has a scale of {limit / 127:g}: the value was zero in the whole calibration text",
                field=seen.name,
                remedy="calibrate with more text, or leave this kind of layer floating: "
                "--layers KIND=fp16",
            )
        return scale_of(limit)

    def _record_site(self, seen: SeenRange, scale: F32, how: Static) -> None:
        entry: dict[str, Any] = {
            "absmax": _rounded(float(seen.channels.max(initial=0))),
            "scale": _rounded(float(scale.max())),
        }
        if scale.size > 1:
            entry["smallest_scale"] = _rounded(float(scale.min()))
            entry["channels"] = int(scale.size)
        elif how.clip != "absmax":
            entry["clip"] = how.clip
            entry["clipped"] = _rounded(seen.clipped(float(scale[0])))
        if how.rotate:
            entry["rotated"] = True
            blocks = rotation_blocks(seen.channels.size)
            if blocks > 1:
                entry["rotation_blocks"] = blocks
        self.record[seen.name] = entry


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
