"""The meaning of the device ops, from the references and a plain model of slots, logs and replays.

It is given the pending tokens of a state (`Steps`), and never reads what steers the ops: `run`,
`replay`, `taps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge.plugins.catalogue import OPS
from edge.plugins.device.statements import DEVICE_OPS, viewable
from edge.plugins.reference.graph import by_name
from edge.runtime.ledger import ADVANCED, LAST

Array = NDArray[Any]
Given = Mapping[str, Array]
Attributes = Mapping[str, float]
_LOGGED = {"scan_x": "x", "scan_dt": "dt", "scan_B": "B"}


@dataclass(frozen=True)
class Steps:
    """One run over a state with pending tokens.

    Attributes:
        pending: log rows of the tokens that the state has yet to take, oldest first.
        advance: number of them that the stored state has taken, if `store` is ADVANCED.
        slots: log row of each new token, -1 for none.
        parents: parents of the new tokens of a tree, None for a chain.
    """

    pending: tuple[int, ...]
    advance: int
    source: int
    store: int
    past: int
    slots: tuple[int, ...]
    parents: tuple[int, ...] | None = None

    @property
    def target(self) -> int:
        return 1 - self.source


def expected(name: str, given: Given, attributes: Attributes, steps: Steps) -> dict[str, Array]:
    """Return the outputs of the device op by name, given its inputs by name."""
    own = {
        v: array[..., attributes[f"{v}_start"] :][..., : attributes[f"{v}_width"]]
        if v in viewable(DEVICE_OPS[name])
        else array
        for v, array in given.items()
    }
    if name.endswith("Conv"):
        return _product_and_conv(name, own, attributes, steps)
    if name.endswith("Dt"):
        return _scan_with_dt(name, own, attributes, steps)
    if name.endswith("HadamardQuantize") and name != "HadamardQuantize":
        normed = functional("GatedRMSNormInt8", own, attributes)["y"]
        return functional("HadamardQuantize", {**own, "x": normed}, attributes)
    if "Attention" in name:
        return _attention(own, attributes, steps)
    op = name.partition("_")[0]
    if op.startswith("CausalConv"):
        return _conv(op, own, attributes, steps)
    if op.startswith("SelectiveScan") or op == "GatedDeltaRule":
        return _scan(op, own, attributes, steps)
    if name == "Greedy":
        return {"picked": _greedy(given["logits"])}
    if op in OPS:
        return functional(op, own, attributes)
    every = functional(op.removesuffix("Rows"), own, attributes)["y"]
    return {"y": every[given["rows"]]}


def functional(op: str, given: Given, attributes: Attributes) -> dict[str, Array]:
    """Run the op of the domain `edge` by its reference."""
    statement = OPS[op]
    tensors = [_tensor(given[v.name], v.dtypes) for v in statement.inputs if v.name in given]
    outputs = by_name(op, attributes)(*tensors)
    return {v.name: y.numpy() for v, y in zip(statement.outputs, outputs, strict=True)}


def _tensor(array: Array, dtypes: tuple[str, ...]) -> torch.Tensor:
    if dtypes == ("u8",):
        array = array.view(np.uint8)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.long() if tensor.dtype == torch.int32 else tensor


def _logged(log: Array, new: Array, steps: Steps) -> Array:
    """Return the log with each new token in its row."""
    after = log.copy()
    for token, row in enumerate(steps.slots):
        if row >= 0:
            after[row] = new[token]
    return after


def _stored(state: Array, saved: Array | None, last: Array, steps: Steps) -> Array:
    """Return the slots after the run. `saved` is the state after `advance` pending tokens."""
    after = state.copy()
    if steps.store == LAST:
        after[steps.target] = last
    elif steps.store == ADVANCED:
        assert saved is not None
        after[steps.target] = saved
    return after


def _conv(op: str, given: Given, attributes: Attributes, steps: Steps) -> dict[str, Array]:
    x, state, log = given["x"], given["conv_state"], given["conv_in"]
    width, taken, count = state.shape[1], len(steps.pending), len(x)
    inputs = np.concatenate([state[steps.source], log[list(steps.pending)], x])
    last = inputs[len(inputs) - width :]
    saved = inputs[steps.advance : steps.advance + width]
    rows = np.arange(count)[:, None] + np.arange(width + 1)
    run = {
        **given,
        "conv_state": inputs[taken : taken + width],
        "taps": rows,
        "kept_taps": rows[-1:, 1:],
    }
    return {
        "y": functional(op, run, attributes)["y"],
        "conv_state_out": _stored(state, saved, last, steps),
        "conv_in_out": _logged(log, x, steps),
    }


def _scan(op: str, given: Given, attributes: Attributes, steps: Steps) -> dict[str, Array]:
    def run(values: Given, state: Array) -> tuple[Array, Array]:
        """Return y, and the state after each token."""
        every = np.arange(len(values["x"]))
        steering = {"kept": every, "parents": every - 1, "tree": np.array(False)}
        steering |= {"last_only": np.array(False), "ancestors": np.tri(len(every), dtype="f4")}
        found = functional(op, {**given, **values, "ssm_state": state, **steering}, attributes)
        return found["y"], found["ssm_states"]

    state = given["ssm_state"][steps.source]
    saved = None
    if steps.pending:
        rows = list(steps.pending)
        replayed = {name: given[log][rows] for log, name in _LOGGED.items()}
        # the outputs of these tokens are not read
        replayed["C"] = np.zeros((len(rows), *given["C"].shape[1:]), given["C"].dtype)
        if "z" in given:
            replayed["z"] = np.zeros((len(rows), *given["z"].shape[1:]), given["z"].dtype)
        states = run(replayed, state)[1]
        state, saved = states[-1], states[steps.advance - 1]
    y, states = run({name: given[name] for name in ("x", "dt", "B")}, state)
    return {
        "y": y,
        "ssm_state_out": _stored(given["ssm_state"], saved, states[-1], steps),
        **{f"{log}_out": _logged(given[log], given[name], steps) for log, name in _LOGGED.items()},
    }


def _scan_with_dt(
    name: str, given: Given, attributes: Attributes, steps: Steps
) -> dict[str, Array]:
    weight = {"x": given["low_dt"], "weight": given["dt_weight"]}
    if "dt_scale" in given:
        weight |= {"x_scale": given["low_dt_scale"], "y_scale": given["dt_scale"]}
        weight |= {"weight_scale": given["dt_weight_scale"]}
    product = "LinearInt8Quantize" if "dt_scale" in given else "Linear"
    dt = functional(product, weight, attributes)["y"]
    op = name.removesuffix("Dt").partition("_")[0]
    return _scan(op, {**given, "dt": dt}, attributes, steps)


def _product_and_conv(
    name: str, given: Given, attributes: Attributes, steps: Steps
) -> dict[str, Array]:
    product = name.removesuffix("Conv")
    y = functional(product, given, attributes)["y"]
    first = int(attributes["conv_start"])
    channels = given["conv_weight"].shape[-1]
    convolved = {n.removeprefix("conv_"): a for n, a in given.items() if n.startswith("conv_")}
    convolved |= {n: given[n] for n in ("conv_state", "conv_in")}
    convolved["x"] = y[..., first : first + channels]
    op = "CausalConv1dInt8" if "Int8" in product else "CausalConv1d"
    found = _conv(op, convolved, attributes, steps)
    return {"y": y, "conv_y": found.pop("y"), **found}


def _attention(given: Given, attributes: Attributes, steps: Steps) -> dict[str, Array]:
    """Compute one query after another, over the slots that it sees."""
    heads, kv, p = (int(attributes[name]) for name in ("heads", "kv_heads", "head_dim"))
    caches = {name: given[name].copy() for name in ("key_cache", "value_cache")}
    q, k, v = (given[name] for name in ("q", "k", "v"))
    q, k, v = (m.reshape(*m.shape[:2], -1, p) for m in (q, k, v))
    if "cos" in given:
        q, k = (_rotated(m, given["cos"], given["sin"]) for m in (q, k))
    count, batch = q.shape[:2]
    for t in range(count):
        caches["key_cache"][:, :, steps.past + t] = k[t]
        caches["value_cache"][:, :, steps.past + t] = v[t]
    y = np.zeros((count, batch, heads, p), np.float32)
    for t in range(count):
        seen = [*range(steps.past), *(steps.past + node for node in _path(t, steps.parents))]
        seen = sorted(seen)[-int(attributes["window"]) :]
        for head in range(heads):
            keys, values = (cache[:, head // (heads // kv)][:, seen] for cache in caches.values())
            scores = attributes["scale"] * np.einsum("bp,bsp->bs", q[t, :, head], keys)
            if cap := attributes["softcap"]:
                scores = cap * np.tanh(scores / cap)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            y[t, :, head] = np.einsum("bs,bsp->bp", shares, values) / shares.sum(-1, keepdims=True)
    return {"y": y.reshape(count, batch, -1), **{f"{n}_out": c for n, c in caches.items()}}


def _path(token: int, parents: tuple[int, ...] | None) -> list[int]:
    if parents is None:
        return list(range(token + 1))
    path = []
    while token >= 0:
        path.append(token)
        token = parents[token]
    return path


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    half = cos.shape[-1]
    cos, sin = cos[:, None, None], sin[:, None, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _greedy(logits: Array) -> Array:
    picked = np.full(logits.shape[:-1], -1, np.int32)
    for at in np.ndindex(*picked.shape):
        if not np.isnan(logits[at]).any():
            picked[at] = np.flatnonzero(logits[at] == logits[at].max())[0]
    return picked
