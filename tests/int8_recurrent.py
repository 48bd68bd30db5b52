"""Inputs for the int8 convolution and scans, and the reference's outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge.plugins.catalogue import OPS
from edge.plugins.causal_conv1d import reference as causal_conv1d
from edge.plugins.onnx import Flavour
from edge.plugins.selective_scan import reference as selective_scan
from edge.plugins.selective_scan_heads import reference as selective_scan_heads
from tests.onnx_ops import ancestors, chain, random_parents, run_op

Array = NDArray[Any]
STATE_TYPES = {32: np.float32, 16: np.float16, 8: np.int8}
# For y, relative to the largest: a state may be one step off.
TOLERANCE = {32: 2e-5, 16: 1e-3, 8: 2e-2}
# Values that the flavour `ort` holds as u8 with zero point 128.
UNSIGNED = {
    "CausalConv1dInt8": (),
    "SelectiveScanInt8": ("x", "B", "C"),
    "SelectiveScanGroupsInt8": ("x", "B", "C"),
    "SelectiveScanHeadsInt8": ("x", "B", "C", "x_log", "B_log"),
}


def int8(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(-128, 128, shape).astype(np.int8)


def scale(of: float, rng: np.random.Generator | None = None, *shape: int) -> Array:
    """Return one scale for values up to `of`, or one of about that size per channel."""
    if rng is None:
        return np.array([of / 127], np.float32)
    return (of / 127 * rng.uniform(0.3, 1.7, shape)).astype(np.float32)


def run(
    op: str,
    flavour: Flavour,
    feeds: dict[str, Array],
    constant: bool = False,
    **attributes: float,
) -> dict[str, Array]:
    """Run an op; outputs are int8, whatever the flavour uses. `constant` is `run_op`'s."""
    feeds = dict(feeds)
    if flavour == "ort":
        for name in feeds.keys() & set(UNSIGNED[op]):
            feeds[name] = (feeds[name].astype(np.int16) + 128).astype(np.uint8)
    out = run_op(OPS[op].function(attributes), flavour, feeds, constant, **attributes)
    if out["y"].dtype == np.uint8:
        out["y"] = (out["y"].astype(np.int16) - 128).astype(np.int8)
    return out


class Compared:
    """Counts quantized values that differ, over everything a test compares."""

    def __init__(self) -> None:
        self.values = self.apart = 0

    def int8(self, found: Array, expected: Array) -> None:
        assert found.dtype == expected.dtype == np.int8
        self.steps(found, expected)

    def steps(self, found: Array, expected: Array) -> None:
        """Return integers, or the bits of fp16 numbers as integers: neighbours differ by one."""
        assert found.shape == expected.shape
        steps = np.abs(found.astype(int) - expected.astype(int))
        assert steps.max() <= 1
        self.values += steps.size
        self.apart += int(steps.sum())

    def floats(self, found: Array, expected: Array, tolerance: float) -> None:
        assert found.dtype == expected.dtype and found.shape == expected.shape
        found, expected = found.astype(np.float64), expected.astype(np.float64)
        largest = max(1.0, float(np.abs(expected).max()))
        assert float(np.abs(found - expected).max()) <= tolerance * largest

    def state(self, found: Array, expected: Array) -> None:
        if found.dtype == np.int8:
            self.int8(found, expected)
        else:
            self.floats(found, expected, 1e-5 if found.dtype == np.float32 else 1e-3)

    def check(self) -> None:
        """Allow 1 difference in 10,000 values, and always one: some value lies near a half."""
        assert self.apart <= max(1, self.values // 10_000)


def torched(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]


def batch_first(*arrays: Array) -> list[torch.Tensor]:
    return torched(*(a.swapaxes(0, 1) for a in arrays))


def routes(steps: int, rng: np.random.Generator) -> list[tuple[list[int], Array, bool]]:
    """Return (parents, kept, last_only) for every way through a recurrence of `steps`."""
    every, last = np.arange(steps), np.array([steps - 1])
    some = np.unique([0, steps // 2, steps - 1])
    if steps > 16:
        return [(chain(steps), kept, kept is last) for kept in (some, last)]
    tree = random_parents(steps, rng)
    return [
        (chain(steps), every, steps == 1),
        (chain(steps), some, False),
        (chain(steps), last, True),
        (tree, every, False),
        (tree, some[-2:], False),
    ]


def steering(parents: list[int], kept: Array, last_only: bool) -> dict[str, Array]:
    return {
        "kept": kept,
        "parents": np.array(parents, np.int64),
        "tree": np.array(parents != chain(len(parents))),
        "last_only": np.array(last_only),
        "ancestors": ancestors(parents),
    }


def conv_feeds(
    rng: np.random.Generator, steps: int, batch: int, width: int, a_channel: bool, c: int = 45
) -> dict[str, Array]:
    of = (rng, c) if a_channel else ()
    return {
        "x": int8(rng, steps, batch, c), "x_scale": scale(4, *of),
        "conv_state": int8(rng, width - 1, batch, c),
        "weight": int8(rng, width, 1, c), "weight_scale": scale(1, *of),
        "bias": int8(rng, c), "bias_scale": scale(1, *of), "y_scale": scale(3, *of),
    }  # fmt: skip


def conv_expected(f: dict[str, Array], path: list[int]) -> tuple[Array, Array]:
    """Return y [B, C] of the last token of `path`, and conv_state [K-1, B, C] after it."""
    y, after = conv_outputs(f, path)
    return y[-1], after


def conv_outputs(f: dict[str, Array], path: list[int]) -> tuple[Array, Array]:
    """Return y [T, B, C] of the tokens of `path`, and conv_state [K-1, B, C] after the last."""
    x, state = batch_first(f["x"][path], f["conv_state"])
    weight = torch.from_numpy(f["weight"][:, 0].T.copy())
    scales = torched(*(f[f"{n}_scale"] for n in ("x", "weight", "bias", "y")))
    bias = torch.from_numpy(f["bias"])
    y, after = causal_conv1d.causal_conv1d_int8(
        x, scales[0], state, weight, scales[1], bias, scales[2], scales[3]
    )
    return y.transpose(0, 1).numpy(), after.transpose(0, 1).numpy()


def scan_feeds(
    rng: np.random.Generator,
    steps: int,
    batch: int,
    bits: int,
    a_channel: bool = False,
    e: int = 29,
    n: int = 5,
    groups: tuple[int, int] = (1, 1),
) -> dict[str, Array]:
    """Return inputs of Mamba-1; `groups` of B and of C."""
    of_b, of_c = (count * n for count in groups)

    def of(*shape: int) -> tuple[Any, ...]:
        return (rng, *shape) if a_channel else ()

    state = int8(rng, batch, n, e)
    if bits != 8:
        state = (state / 16).astype(STATE_TYPES[bits])
    return {
        "x": int8(rng, steps, batch, e), "x_scale": scale(3, *of(e)),
        "dt": int8(rng, steps, batch, e), "dt_scale": scale(4, *of(e)),
        "B": int8(rng, steps, batch, of_b), "B_scale": scale(3, *of(of_b)),
        "C": int8(rng, steps, batch, of_c), "C_scale": scale(3, *of(of_c)),
        "z": int8(rng, steps, batch, e), "z_scale": scale(5, *of(e)),
        "A_log": int8(rng, n, e), "A_log_scale": scale(2.8),
        "D": int8(rng, e), "D_scale": scale(2),
        "dt_bias": int8(rng, e), "dt_bias_scale": scale(4),
        "ssm_state": state, "state_scale": scale(12, *of(n, 1)),
    }  # fmt: skip


def scan_expected(f: dict[str, Array], path: list[int]) -> tuple[Array, Array]:
    """Return y [B, E] of the last token of `path`, and the state after it."""
    given = dict(zip(f, torched(*f.values()), strict=True))
    given |= {name: given[name][path].swapaxes(0, 1) for name in ("x", "dt", "B", "C", "z")}
    y, after = selective_scan.selective_scan_int8(**given | {"A_log": given["A_log"].T})
    return y[:, -1].numpy(), after.numpy()


HEADS, HEAD_DIM, STATE = 6, 5, 7


def heads_feeds(
    rng: np.random.Generator,
    steps: int,
    batch: int,
    groups: int,
    bits: int,
    a_channel: bool = False,
) -> dict[str, Array]:
    inner, shares = HEADS * HEAD_DIM, groups * STATE

    def of(*shape: int) -> tuple[Any, ...]:
        return (rng, *shape) if a_channel else ()

    state = int8(rng, batch, HEADS, HEAD_DIM, STATE)
    if bits != 8:
        state = (state / 16).astype(STATE_TYPES[bits])
    return {
        "x": int8(rng, steps, batch, inner), "x_scale": scale(3, *of(inner)),
        "dt": int8(rng, steps, batch, HEADS), "dt_scale": scale(4, *of(HEADS)),
        "B": int8(rng, steps, batch, shares), "B_scale": scale(3, *of(shares)),
        "C": int8(rng, steps, batch, shares), "C_scale": scale(3, *of(shares)),
        "A_log": int8(rng, HEADS), "A_log_scale": scale(2.8),
        "D": int8(rng, HEADS), "D_scale": scale(2),
        "dt_bias": int8(rng, HEADS), "dt_bias_scale": scale(4),
        "ssm_state": state, "state_scale": scale(12, *of(HEADS, 1, STATE)),
    }  # fmt: skip


def heads_expected(
    f: dict[str, Array], path: list[int], groups: int, limit: tuple[float, float]
) -> tuple[Array, Array]:
    """Return y [B, H·P] of the last token of `path`, and the state after it."""
    given = dict(zip(f, torched(*f.values()), strict=True))
    given |= {name: given[name][path].swapaxes(0, 1) for name in ("x", "dt", "B", "C")}
    y, after = selective_scan_heads.selective_scan_heads_int8(
        groups=groups, dt_limit=limit, **given
    )
    return y[:, -1].numpy(), after.numpy()


def heads_attributes(groups: int, limit: tuple[float, float], state_bits: int) -> dict[str, float]:
    return {
        "heads": HEADS, "head_dim": HEAD_DIM, "groups": groups, "d_state": STATE,
        "dt_min": limit[0], "dt_max": limit[1], "state_bits": state_bits,
    }  # fmt: skip


CASES = [
    ("SelectiveScanInt8", 1), ("SelectiveScanGroupsInt8", 6),
    ("SelectiveScanHeadsInt8", 1), ("SelectiveScanHeadsInt8", 2),
]  # fmt: skip


def any_feeds(
    op: str,
    rng: np.random.Generator,
    steps: int,
    batch: int,
    groups: int,
    bits: int,
    a_channel: bool = True,
) -> tuple[dict[str, Array], dict[str, float]]:
    if "Heads" not in op:
        several: dict[str, Any] = {"e": 30, "groups": (2, groups)} if groups > 1 else {}
        feeds = scan_feeds(rng, steps, batch, bits, a_channel, **several)
        return feeds, {"state_bits": bits}
    feeds = heads_feeds(rng, steps, batch, groups, bits, a_channel)
    return feeds, heads_attributes(groups, (0.01, 3.0), bits)
