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
from edge.apps.programs import Program
from edge.runtime.model import load

X, Y = ": x of the scan", ": y"
app = Program()


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
    clipped = numbers(percentiles, float, "--percentiles", "99,99.9")
    counts = numbers(bits, int, "--bits", "6,4")
    this, other = (load(name, threads=1) for name in (bundle, floating))
    (whole,) = (site for site in sites(this, other) if site.name == ALL)
    named = {value: site_name(other.config, value, False) for value in whole.values}
    how = Windows(SHORT_WINDOW, SHORT_WINDOW // 2)
    learned, measured = (
        list(TextSource((file,), how, tokens).runs(other)) for file in (calibrate, text)
    )
    tried = [replace(whole, name="as the bundle does")]
    seen = {value: Seen() for value, name in named.items() if name.endswith(X)}
    if seen:
        measure_sites(other, [Site("x", "activation", dict(seen))], learned)
    for name, way in ways(clipped).items() if seen else ():
        changed = {value: way(torch.cat(x.parts)) for value, x in seen.items()}
        tried.append(replace(whole, name=f"x {name}", values={**whole.values, **changed}))
    for count in counts:
        fewer = {
            value: FewerBits(x.scale, x.turn, x.threshold, count)
            for value, x in whole.values.items() if isinstance(x, ValueRounding)
        }  # fmt: skip
        tried.append(replace(whole, name=f"{count} bits", values=fewer))
        for kept in (X, Y) if seen else ():
            spared = {v: whole.values[v] for v, name in named.items() if name.endswith(kept)}
            name = f"{count} bits, but 8 of {kept[2:]}"
            tried.append(replace(whole, name=name, values={**fewer, **spared}))
    rows = [
        (site.name, f"{found.ratio:.4f}", f"{facts['kl_nats_per_token']:.4f}",
         f"{facts['top1_agreement']:.1%}")
        for site, found in measure_sites(other, tried, measured)
        if (facts := found.to_dict())
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
        most = 2 ** (self.bits - 1) - 1
        if self.scale is None:
            floats = x.abs() >= (math.inf if self.threshold is None else self.threshold)
            scale = x.masked_fill(floats, 0).abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
        else:
            floats, scale = self.scale > NEVER, self.scale * (127 / most)
        return torch.where(floats, x, torch.round(x / scale).clamp(-most - 1, most) * scale)


# -- tables 5 and 11: from observed values to a rounding to 8 bits --------------------------------


def ways(percentiles: Iterable[float]) -> dict[str, Callable[[Tensor], Rounder]]:
    """Return ways of rounding x by name, in the paper's order."""
    found: dict[str, Callable[[Tensor], Rounder]] = {
        "dynamic, a scale a token": lambda seen: ValueRounding(None),
        "static": lambda seen: ValueRounding(seen.abs().max()[None] / 127),
        "static, powers of two": _powers_of_two,
    }
    for p in percentiles:
        found[f"static, {p:g} %, asymmetric"] = partial(_asymmetric, p / 100)
        found[f"static, {p:g} %"] = partial(_clipped, p / 100)
    return found


def _powers_of_two(seen: Tensor) -> Rounder:
    """Round to sign and exponent: the power of 2 with the nearest logarithm."""
    top = seen.abs().max()
    return lambda x: x.sign() * top * 2 ** torch.round(torch.log2(x.abs() / top)).clamp(-126, 0)


def _clipped(share: float, seen: Tensor) -> Rounder:
    return ValueRounding(seen.abs().quantile(share)[None] / 127)


def _asymmetric(share: float, seen: Tensor) -> Rounder:
    """Round to a range from a low to a high percentile, with a zero point."""
    low, high = (seen.quantile(at) for at in (1 - share, share))
    step = (high - low) / 255
    zero = torch.round(-low / step)
    return lambda x: ((torch.round(x / step) + zero).clamp(0, 255) - zero) * step


if __name__ == "__main__":
    leave(app)
