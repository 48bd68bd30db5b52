"""The device graph run in ONNX Runtime through its functions: one state, driven as by an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray

from edge.export.graph.run import open_session, session_options
from edge.launch import TARGET
from edge.runtime.cuda.inputs import DeviceRun, Sources
from edge.runtime.ledger import ReplayLedger, ReplayStep, log_slots
from tests.tensorrt.graphs import Made

Array = NDArray[Any]
_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(int32)": np.int32,
}


class DeviceRunner:
    """Run a device graph. Persistent memory is `arrays`, by the graph's names; it starts as zeros,
    caches and logs as poison.

    Attributes:
        ledger: ledger of the state.
        picked: the best tokens that the last run found, i32 [L, B].
    """

    def __init__(self, made: Made, *, window: int, batch: int = 1, capacity: int = 0) -> None:
        self.session: ort.InferenceSession = open_session(
            made.folder, made.device.SerializeToString(), session_options(1)
        )
        self.ledger = ReplayLedger(window)
        self.picked: Array = np.empty(0)
        self._sources = Sources(made.plan)
        self._batch = batch
        self._sizes = {"B": batch, "S": log_slots(window), "C": capacity}
        self._entries = {entry.name: entry for entry in self.session.get_inputs()}
        self._outputs = [entry.name for entry in self.session.get_outputs()]
        self.arrays = {
            name: self._fresh(name) for name in self._entries if f"{name}.out" in self._outputs
        }

    def run(self, tokens: Array, *, commit: bool = False, rows: Sequence[int] = (-1,)) -> Array:
        """Return the logits [L, B, V] of `rows` of the chain `tokens` [T, B], which can be rewound.

        With `commit` only the state after the last is kept, for any number of tokens.
        """
        count = len(tokens)
        step = self.ledger.commit(count) if commit else self.ledger.run(count)
        feeds = self._inputs(DeviceRun(tokens, step, [row % count for row in rows]))
        out = self.session.run(self._outputs, feeds | self.arrays)
        logits, self.picked, *after = out
        for name, array in zip(self._outputs[2:], after, strict=True):
            before = self.arrays[name.removesuffix(".out")]
            assert array.shape == before.shape and array.dtype == before.dtype
            self.arrays[name.removesuffix(".out")] = array
        self.ledger = step.after
        return np.asarray(logits)

    def back(self, count: int) -> None:
        self.ledger = self.ledger.back(count)

    def state(self) -> dict[str, Array]:
        """Return the recurrent state and the valid slots of caches; nothing is pending."""
        assert not self.ledger.pending
        found = {
            name: array[self.ledger.source]
            for name, array in self.arrays.items()
            if name.endswith(("conv_state", "ssm_state"))
        }
        caches = (name for name in self.arrays if name.endswith("_cache"))
        return found | {n: self.arrays[n][:, :, : self.ledger.position] for n in caches}

    def _fresh(self, name: str) -> Array:
        entry = self._entries[name]
        shape = [self._sizes.get(dim, dim) for dim in entry.shape]
        found = np.zeros(shape, _TYPES[entry.type])
        if not name.endswith("_state"):
            found[:] = -77 if found.dtype == np.int8 else np.nan
        return found

    def _inputs(self, run: DeviceRun) -> dict[str, Array]:
        """Return a chain's inputs: `ancestors` of one token, and `replay` without spare entries."""
        step: ReplayStep = run.step
        sizes = self._sizes | {
            "T": len(run.tokens), "L": len(run.rows), "A": 1, "P": max(1, len(step.pending)),
        }  # fmt: skip
        arrays = {
            name: np.zeros([sizes.get(dim, dim) for dim in entry.shape], _TYPES[entry.type])
            for name, entry in self._entries.items()
            if name not in self.arrays
        }
        flat = {name: array.reshape(-1) for name, array in arrays.items() if name != "ancestors"}
        self._sources.fill(flat, run)
        assert flat["run"][TARGET] == 1 - step.source
        return arrays
