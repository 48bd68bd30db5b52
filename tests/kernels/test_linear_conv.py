"""A product fused with the convolution of its columns equals the two launches, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from edge.plugins.catalogue import OPS
from edge.plugins.causal_conv1d.device import behind_product
from edge.plugins.lowering.context import Regime
from edge.plugins.lowering.lowerings import LOWER
from tests.int8_recurrent import conv_feeds
from tests.kernels.recurrent_inputs import ADVANCED, LAST, Logs, Run, same_bits, two_slots
from tests.kernels.rowwise import Workbench

COLUMNS, START, CHANNELS, OUTPUTS, WINDOW = 72, 19, 53, 101, 4
STATE, LOG = "layers.0.conv_state", "layers.0.conv_in"
PRODUCT = {
    "int8": ("in_scale", "w", "w_scale", "made_scale"),
    "float": ("w",),
    "half": ("w",),
}
CONVOLUTION = {
    "int8": (
        "x_scale", STATE, "taps", "kept_taps", "weight", "weight_scale", "bias", "bias_scale",
        "y_scale",
    ),
    "float": (STATE, "taps", "kept_taps", "weight", "bias"),
    "half": (STATE, "taps", "kept_taps", "weight", "bias"),
}  # fmt: skip
RUNS = [
    (Run((), range(1), store=LAST), 1),
    (Run(range(2), range(2, 7), store=LAST, source=1), 3),
    (Run(range(4), range(4, 6), 3, ADVANCED), 8),
    (Run(range(3), range(3, 8), parents=[-1, 0, 0, 1, -1]), 2),
    (Run((), range(16)), 1),
]


def _bench(kind: str, run: Run, batch: int) -> tuple[Workbench, Logs]:
    """Set values, weights, state and log, the same for both ways."""
    rng = np.random.default_rng(batch)
    make = torch.Generator().manual_seed(batch)
    int8 = kind == "int8"
    feeds = {
        name: torch.from_numpy(value if int8 or "scale" in name else value / np.float32(64))
        for name, value in conv_feeds(rng, 24, batch, WINDOW, True, CHANNELS).items()
    }
    rows = len(run.new) * batch
    if int8:
        x = torch.randint(-128, 128, (rows, COLUMNS), generator=make, dtype=torch.int8)
        w = torch.randint(-128, 128, (OUTPUTS, COLUMNS), generator=make, dtype=torch.int8)
    else:
        x = torch.randn(rows, COLUMNS, generator=make)
        w = torch.randn(OUTPUTS, COLUMNS, generator=make)
    bench, logs = run.bench(batch), Logs(run, batch)
    bench.value("x", x)
    scales = {
        "in_scale": torch.tensor([0.01]),
        "w_scale": torch.rand(OUTPUTS, generator=make) * 0.01,
        "made_scale": torch.rand(OUTPUTS, generator=make) * 0.1 + 0.1,
    }
    for name, value in zip(("taps", "state_taps"), run.taps(WINDOW), strict=True):
        bench.given("input", f"{name}{WINDOW}", value)
    for name in ("weight", "bias", "x_scale", "weight_scale", "bias_scale", "y_scale"):
        bench.constant(name, feeds[name])
    for name, value in {"w": w.half() if kind == "half" else w, **scales}.items():
        bench.constant(name, value)
    bench.given("state", STATE, two_slots(feeds["conv_state"], run.source))
    logs.fill(bench, LOG, feeds["x"])
    return bench, logs


MADE = {"y": "made", "conv_y": "y", "conv_states": "states"}


def ops_of(kind: str) -> tuple[str, str]:
    """Return the product and the convolution."""
    if kind == "int8":
        return "LinearInt8Quantize", "CausalConv1dInt8"
    return "Linear", "CausalConv1d"


def inputs_of(kind: str) -> dict[str, str]:
    """Return values by the names of the pair."""
    product, convolution = (OPS[op] for op in ops_of(kind))
    names = [v.name for v in product.inputs]
    behind = [name for v, name in behind_product(convolution).items() if v != "x"]
    return dict(zip((*names, *behind), ("x", *PRODUCT[kind], *CONVOLUTION[kind]), strict=True))


def _state(bench: Workbench, batch: int) -> Tensor:
    return bench.whole("state", STATE, (2, WINDOW - 1, batch, CHANNELS))


def _log(bench: Workbench, run: Run, batch: int) -> Tensor:
    return bench.whole("log", LOG, (run.slots, batch, CHANNELS))


@pytest.mark.parametrize("kind", list(PRODUCT))
@pytest.mark.parametrize(("run", "batch"), RUNS)
def test_one_launch_is_the_two(kind: str, run: Run, batch: int) -> None:
    apart, _ = _bench(kind, run, batch)
    product, convolution = ops_of(kind)
    apart.lower(LOWER, product, ("x", *PRODUCT[kind]), ("made",))
    apart.lowering.views["part"] = apart.lowering.view("made").columns(START, CHANNELS)
    apart.lower(LOWER, convolution, ("part", *CONVOLUTION[kind]), ("y", "states"))
    apart.run()
    together, logs = _bench(kind, run, batch)
    together.lower(LOWER, f"{product}Conv", inputs_of(kind), MADE, start=START)
    together.run()
    assert len(together.lowering.order) == 1
    for name in ("made", "y"):
        assert same_bits(together.read(name), apart.read(name)), name
    assert len(together.read("y").unique()) > 8
    assert same_bits(_state(together, batch), _state(apart, batch))
    assert same_bits(_log(together, run, batch), _log(apart, run, batch))
    new = torch.zeros(24, batch, CHANNELS, dtype=together.read("made").dtype)
    made = together.read("made")[:, START : START + CHANNELS]
    new[list(run.new)] = made.reshape(len(run.new), batch, CHANNELS)
    logs.check(together, LOG, new)


def test_a_step_of_one_row_has_a_tile_of_eight() -> None:
    bench, _ = _bench("int8", RUNS[0][0], 1)
    bench.lowering.regime = Regime("chain", 1)
    bench.lower(LOWER, "LinearInt8QuantizeConv", inputs_of("int8"), MADE, start=START)
    (_, variant), *_ = bench.tables.variants.values()
    assert variant.constants["ROWS"] == 8
    wide, _ = _bench("int8", RUNS[0][0], 1)
    wide.lower(LOWER, "LinearInt8QuantizeConv", inputs_of("int8"), MADE, start=START)
    for one in (bench, wide):
        one.run()
    assert same_bits(bench.read("y"), wide.read("y"))
