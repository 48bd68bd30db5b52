"""`python -m edge.apps.bench.low_bits`: simulate other roundings of activations.

The floating graph runs with other roundings of a scan's x, and with fewer bits for every activation
(Quamba, arXiv 2410.13229, appendices K and L). Table 11 rounds x in several ways and all else as
Quamba does, table 5 clips x at several percentiles, and tables 12 and 13 measure W4A4. Here every
variant rounds what a bundle's graph rounds, and uses the bundle's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from edge.apps.evaluate.modes import SHORT_WINDOW
from edge.apps.evaluate.roundings import NEVER, ValueRounding
from edge.apps.evaluate.sensitivity import ALL, Rounder, Site, measure_sites, site_name, sites
from edge.apps.evaluate.windows import TextSource, Windows
from edge.apps.exits import leave
from edge.apps.measure.table import FigureTable, show
from edge.apps.options import numbers
from edge.apps.programs import CommandGroup
from edge.runtime.model import load

X, Y = ": x of the scan", ": y"
app = CommandGroup()


@app.command()
def bench(
    bundle: Annotated[str, typer.Argument(help="A quantized bundle.")],
    floating: Annotated[str, typer.Argument(help="The floating-point bundle of the model.")],
    text: Annotated[Path, typer.Argument(help="Text to measure on.")],
    calibrate: Annotated[Path, typer.Argument(help="Text to find the ranges of x on.")],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 2048,
    percentiles: Annotated[str, typer.Option(help="Clip x at these.")] = "99,99.9,99.99,99.999",
    bits: Annotated[str, typer.Option(help="Bits of every activation.")] = "6,4",
) -> None:
    """Compare a bundle's roundings and others with the floating model."""
    clip_percentiles = numbers(percentiles, float, "--percentiles", "99,99.9")
    bit_counts = numbers(bits, int, "--bits", "6,4")
    this, other = (load(name, threads=1) for name in (bundle, floating))
    (full,) = (site for site in sites(this, other) if site.name == ALL)
    site_names = {value: site_name(other.config, value, False) for value in full.values}
    windows = Windows(SHORT_WINDOW, SHORT_WINDOW // 2)
    calibration_runs, text_runs = (
        list(TextSource((file,), windows, tokens).runs(other)) for file in (calibrate, text)
    )
    variants = [replace(full, name="as the bundle does")]
    observers = {value: Seen() for value, name in site_names.items() if name.endswith(X)}
    if observers:
        measure_sites(other, [Site("x", "activation", dict(observers))], calibration_runs)
    for name, make_rounding in ways(clip_percentiles).items() if observers else ():
        roundings = {value: make_rounding(torch.cat(x.parts)) for value, x in observers.items()}
        variants.append(replace(full, name=f"x {name}", values={**full.values, **roundings}))
    for count in bit_counts:
        coarse = {
            value: FewerBits(x.scale, x.turn, x.threshold, count)
            for value, x in full.values.items() if isinstance(x, ValueRounding)
        }  # fmt: skip
        variants.append(replace(full, name=f"{count} bits", values=coarse))
        for suffix in (X, Y) if observers else ():
            spared = {v: full.values[v] for v, name in site_names.items() if name.endswith(suffix)}
            name = f"{count} bits, but 8 of {suffix[2:]}"
            variants.append(replace(full, name=name, values={**coarse, **spared}))
    rows = [
        (site.name, f"{comparison.ratio:.4f}", f"{facts['kl_nats_per_token']:.4f}",
         f"{facts['top1_agreement']:.1%}")
        for site, comparison in measure_sites(other, variants, text_runs)
        if (facts := comparison.to_dict())
    ]  # fmt: skip
    show([FigureTable(("activations", "perplexity, ×", "KL, nats", "same choice"), rows)])


class Seen:
    """Observer that records values and does not change them."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.parts.append(x.flatten())
        return x


@dataclass(frozen=True)
class FewerBits(ValueRounding):
    """A bundle's rounding with a coarser grid over the same range."""

    bits: int = 8

    def _round(self, x: Tensor) -> Tensor:
        limit = 2 ** (self.bits - 1) - 1
        if self.scale is None:
            floats = x.abs() >= (math.inf if self.threshold is None else self.threshold)
            scale = x.masked_fill(floats, 0).abs().amax(-1, keepdim=True).clamp(min=1e-30) / limit
        else:
            floats, scale = self.scale > NEVER, self.scale * (127 / limit)
        return torch.where(floats, x, torch.round(x / scale).clamp(-limit - 1, limit) * scale)


# -- tables 5 and 11: from observed values to a rounding to 8 bits --------------------------------


def ways(percentiles: Iterable[float]) -> dict[str, Callable[[Tensor], Rounder]]:
    """Return ways of rounding x by name, in the paper's order."""
    roundings: dict[str, Callable[[Tensor], Rounder]] = {
        "dynamic, a scale a token": lambda seen: ValueRounding(None),
        "static": lambda seen: ValueRounding(seen.abs().max()[None] / 127),
        "static, powers of two": _powers_of_two,
    }
    for p in percentiles:
        roundings[f"static, {p:g} %, asymmetric"] = partial(_asymmetric, p / 100)
        roundings[f"static, {p:g} %"] = partial(_clipped, p / 100)
    return roundings


def _powers_of_two(values: Tensor) -> Rounder:
    """Round to sign and exponent: the power of 2 with the nearest logarithm."""
    top = values.abs().max()
    return lambda x: x.sign() * top * 2 ** torch.round(torch.log2(x.abs() / top)).clamp(-126, 0)


def _clipped(share: float, values: Tensor) -> Rounder:
    return ValueRounding(values.abs().quantile(share)[None] / 127)


def _asymmetric(share: float, values: Tensor) -> Rounder:
    """Round to a range from a low to a high percentile, with a zero point."""
    low, high = (values.quantile(q) for q in (1 - share, share))
    step = (high - low) / 255
    zero = torch.round(-low / step)
    return lambda x: ((torch.round(x / step) + zero).clamp(0, 255) - zero) * step


if __name__ == "__main__":
    leave(app)
