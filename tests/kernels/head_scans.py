"""Per-head scans on small random layers, through their lowering and Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from edge.launch import ADVANCE, PENDING, SOURCE, STORE, TARGET
from edge.plugins.gated_delta_rule.reference import gated_delta_rule
from edge.plugins.lowering.context import Regime, cdiv
from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.selective_scan_heads.lowering import CHUNK
from edge.plugins.selective_scan_heads.reference import (
    selective_scan_heads,
    selective_scan_heads_int8,
)
from tests.kernels.rowwise import CHAIN, MANY, Workbench, poisoned

_STATES = {32: torch.float32, 16: torch.float16, 8: torch.int8}
_VALUES = ("x", "dt", "B", "C")
STATE = "layers.3.ssm_state"
OUTPUTS = ("y", "states")


@dataclass(frozen=True)
class Layer:
    """Sizes and types of one layer.

    Attributes:
        bits: width of the stored state.
        int8: whether values and weights are int8.
        channels: whether values and state have one scale per channel, not one for all.
    """

    heads: int = 2
    p: int = 20
    n: int = 16
    groups: int = 1
    bits: int = 8
    int8: bool = True
    channels: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    seed: int = 0

    @property
    def widths(self) -> dict[str, int]:
        wide, shares = self.heads * self.p, self.groups * self.n
        return {"x": wide, "dt": self.heads, "B": shares, "C": shares}

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.heads, self.p, self.n

    def weights(self) -> dict[str, Tensor]:
        """Return A (A_log if int8), D, dt_bias, and all scales."""
        random = torch.Generator().manual_seed(self.seed)
        if not self.int8:
            return {
                "A": -torch.empty(self.heads).uniform_(0.2, 4, generator=random),
                "D": torch.randn(self.heads, generator=random),
                "dt_bias": torch.randn(self.heads, generator=random),
            }
        made = {
            name: torch.randint(-127, 128, (self.heads,), generator=random, dtype=torch.int8)
            for name in ("A", "D", "dt_bias")
        }
        scales = {"x": 0.02, "dt": 0.02, "B": 0.015, "C": 0.015}
        for name, size in scales.items():
            made[f"{name}_scale"] = torch.full((self.widths[name] if self.channels else 1,), size)
        shape = (self.heads, 1, self.n) if self.channels else (1,)
        made["state_scale"] = torch.full(shape, 0.03)
        for name, size in (("A", 0.01), ("D", 0.01), ("dt_bias", 0.02)):
            made[f"{name}_scale"] = torch.tensor([size])
        if self.channels:
            for name in (*scales, "state"):
                scale = made[f"{name}_scale"]
                scale *= torch.empty_like(scale).uniform_(0.5, 2, generator=random)
        return made

    def tokens(self, count: int, batch: int, seed: int = 1) -> dict[str, Tensor]:
        """Return x, dt, B, C of [count, batch, width]."""
        random = torch.Generator().manual_seed(seed)
        shapes = {name: (count, batch, width) for name, width in self.widths.items()}
        if self.int8:
            return {
                name: torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
                for name, shape in shapes.items()
            }
        return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}

    def start(self, batch: int, seed: int = 2) -> Tensor:
        """Return a state [batch, H, P, N]."""
        random = torch.Generator().manual_seed(seed)
        shape = (batch, *self.state_shape)
        if self.bits == 8:
            return torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
        return torch.randn(shape, generator=random).to(_STATES[self.bits])

    def reference(self, tokens: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Return y [T, batch, H·P] and the state after the last token."""
        w = self.weights()
        x, dt, b, c = (tokens[name].swapaxes(0, 1) for name in _VALUES)
        if not self.int8:
            x = x.unflatten(-1, (self.heads, self.p))
            b, c = (m.unflatten(-1, (self.groups, self.n)) for m in (b, c))
            y, h = selective_scan_heads(
                x, dt, torch.log(-w["A"]), b, c, w["D"], w["dt_bias"], state, self.dt_limit
            )
            return y.flatten(-2).swapaxes(0, 1), h
        given = {"x": x, "dt": dt, "B": b, "C": c, "ssm_state": state}
        given |= {name.replace("A", "A_log"): value for name, value in w.items()}
        y, h = selective_scan_heads_int8(groups=self.groups, dt_limit=self.dt_limit, **given)
        return y.swapaxes(0, 1), h

    @property
    def sizes(self) -> dict[str, int]:
        """Return the attributes that every per-head scan has."""
        sizes = {"heads": self.heads, "head_dim": self.p, "groups": self.groups}
        return {**sizes, "d_state": self.n}

    def lower(self, bench: Workbench) -> None:
        low, high = self.dt_limit
        limits = {"dt_min": low, "dt_max": high}
        order = (*_VALUES, "A", "D", "dt_bias")
        if self.int8:
            inputs = tuple(part for name in order for part in (name, f"{name}_scale"))
            inputs += (STATE, "state_scale", "kept", "parents", "tree", "last_only", "ancestors")
            bench.lower(
                LOWER, "SelectiveScanHeadsInt8", inputs, OUTPUTS, **self.sizes, **limits,
                state_bits=self.bits,
            )  # fmt: skip
        else:
            inputs = (*order, STATE, "kept", "ancestors")
            bench.lower(LOWER, "SelectiveScanHeads", inputs, OUTPUTS, **self.sizes, **limits)


@dataclass(frozen=True)
class DeltaLayer(Layer):
    """A layer of the gated delta rule."""

    bits: int = 32
    int8: bool = False
    beta_max: float = 1.0

    @property
    def widths(self) -> dict[str, int]:
        return {**super().widths, "dt": 2 * self.heads}

    def weights(self) -> dict[str, Tensor]:
        return {name: w for name, w in super().weights().items() if name != "D"}

    def tokens(self, count: int, batch: int, seed: int = 1) -> dict[str, Tensor]:
        """Return inputs with keys of unit length: with longer ones a state grows without bound."""
        made = super().tokens(count, batch, seed)
        keys = made["B"].unflatten(-1, (self.groups, self.n))
        return {**made, "B": torch.nn.functional.normalize(keys, dim=-1).flatten(-2)}

    def reference(self, tokens: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        w = self.weights()
        x, dt, b, c = (tokens[name].swapaxes(0, 1) for name in _VALUES)
        b, c = (m.unflatten(-1, (self.groups, self.n)) for m in (b, c))
        y, h = gated_delta_rule(
            x.unflatten(-1, (self.heads, self.p)), dt, torch.log(-w["A"]), b, c, w["dt_bias"],
            state, self.beta_max,
        )  # fmt: skip
        return y.flatten(-2).swapaxes(0, 1), h

    def lower(self, bench: Workbench) -> None:
        inputs = (*_VALUES, "A", "dt_bias", STATE, "kept", "parents", "tree", "last_only")
        bench.lower(LOWER, "GatedDeltaRule", inputs, OUTPUTS, **self.sizes, beta_max=self.beta_max)


@dataclass(frozen=True)
class Run:
    """One launch: `old` tokens are in the log, and the first PENDING of them are replayed.

    Attributes:
        replay: log slots to replay, oldest first.
        slots: log slots of the new tokens, -1 for none.
        ancestors: [T, T] of a tree.
    """

    layer: Layer
    state: Tensor  # [batch, …], in slot `source`
    new: dict[str, Tensor]
    old: dict[str, Tensor] | None = None
    replay: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    log_slots: int = 12
    advance: int = 0
    store: int = 0
    source: int = 0
    regime: Regime = CHAIN
    ancestors: Tensor | None = None


@dataclass
class Outcome:
    """The results of a run: y [T, batch, H·P], state [2, batch, …], logs [S, batch, width].

    Attributes:
        starts: of a prefill in chunks, the first states of all but the first [batch, …].
    """

    y: Tensor
    state: Tensor
    logs: dict[str, Tensor] = field(default_factory=dict)
    starts: list[Tensor] = field(default_factory=list)


def launch(run: Run) -> Outcome:
    """Lower the op and run its launches. The other state slot and free log rows are poisoned."""
    layer, batch = run.layer, run.state.shape[0]
    steps = run.new["x"].shape[0]
    bench = Workbench(run.regime, T=steps, B=batch, S=run.log_slots)
    for name, value in run.new.items():
        # as in a layer: x, B and C are parts of one row, dt of another
        width = value.shape[-1]
        bench.value(name, value.reshape(-1, width), stride=width + 48, start=16)
    weights = layer.weights()
    for name, array in weights.items():
        bench.constant(name, array)
    _give_state(bench, run)
    numbers = torch.zeros(8, dtype=torch.int32)
    for at, value in (
        (PENDING, len(run.replay)), (ADVANCE, run.advance), (SOURCE, run.source),
        (TARGET, 1 - run.source), (STORE, run.store),
    ):  # fmt: skip
        numbers[at] = value
    bench.given("input", "run", numbers)
    replay = poisoned(run.log_slots, torch.int32)
    replay[: len(run.replay)] = torch.tensor(run.replay, dtype=torch.int32)
    bench.given("input", "replay", replay)
    slots = run.slots or (-1,) * steps
    bench.given("input", "slots", torch.tensor(slots, dtype=torch.int32))
    if run.ancestors is not None:
        bench.given("input", "ancestors", run.ancestors.to(torch.int32))
    layer.lower(bench)
    bench.run()
    shape = (run.log_slots, batch)
    return Outcome(
        bench.read("y").view(steps, batch, layer.widths["x"]),
        bench.whole("state", STATE, (2, *run.state.shape)),
        {
            name: bench.whole("log", f"layers.3.scan_{name}", (*shape, layer.widths[name]))
            for name in ("x", "dt", "B")
        },
        _starts(bench, run.state.shape, cdiv(steps, CHUNK)),
    )


def _starts(bench: Workbench, shape: tuple[int, ...], chunks: int) -> list[Tensor]:
    if ("value", "y.later") not in bench.memory:
        return []
    return list(bench.whole("value", "y.later", (max(0, chunks - 1), *shape)))


def _give_state(bench: Workbench, run: Run) -> None:
    both = poisoned(2 * run.state.numel(), run.state.dtype).view(2, *run.state.shape)
    both[run.source] = run.state
    bench.given("state", STATE, both)
    for name in ("x", "dt", "B"):
        dtype = run.new[name].dtype
        batch, width = run.state.shape[0], run.layer.widths[name]
        log = poisoned(run.log_slots * batch * width, dtype).view(run.log_slots, batch, width)
        if run.old is not None:
            for slot, row in zip(run.replay, run.old[name], strict=True):
                log[slot] = row
        bench.given("log", f"layers.3.scan_{name}", log)


def part(tokens: dict[str, Tensor], rows: slice | list[int]) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in tokens.items()}


def check_kept(run: Run) -> None:
    """Check that tokens with a slot are kept in the logs, and that nothing else is written."""
    out = launch(run)
    kept = {slot: t for t, slot in enumerate(run.slots) if slot >= 0}
    free = [slot for slot in range(12) if slot not in kept and slot not in run.replay]
    for name, log in out.logs.items():
        assert all(same(log[slot], run.new[name][t]) for slot, t in kept.items())
        assert untouched(log[free])
    assert same(out.state[0], run.state) and untouched(out.state[1])


def check_independent(layer: Layer, steps: int) -> None:
    """Check that each of three sequences of a prompt gets what it gets alone."""
    tokens, state = layer.tokens(steps, 3), layer.start(3)
    together = launch(Run(layer, state, tokens, store=2, regime=MANY))
    for b in range(3):
        mine = {name: value[:, b : b + 1] for name, value in tokens.items()}
        alone = launch(Run(layer, state[b : b + 1], mine, store=2, regime=MANY))
        assert same(together.y[:, b : b + 1], alone.y)
        assert same(together.state[1, b : b + 1], alone.state[1])


def same(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit, NaN included."""
    return a.shape == b.shape and bool(torch.equal(_bits(a), _bits(b)))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int8)


def untouched(x: Tensor) -> bool:
    """Check that a tensor is still as `poisoned` left it."""
    return same(x, poisoned(x.numel(), x.dtype).view(x.shape))


__all__ = [
    "DeltaLayer",
    "Layer",
    "Outcome",
    "Run",
    "launch",
    "part",
    "replace",
    "same",
    "untouched",
]
