"""Run an exported graph with plain ONNX Runtime or the reference ops, for export and tests.

Each run allocates memory and copies states; the runtime's engine does neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge import cpu
from edge.config import ModelConfig
from edge.errors import ExportError
from edge.export.graph.model import GRAPH_FILE
from edge.onnx_runtime import onnxruntime as ort
from edge.plugins.reference.graph import ReferenceGraph

F32 = NDArray[np.float32]
Tokens = NDArray[np.int64]
_DTYPES: dict[str, type] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}


class GraphSession(Protocol):
    """ONNX Runtime's session, or `ReferenceGraph`."""

    def get_inputs(self) -> Sequence[Any]: ...

    def get_outputs(self) -> Sequence[Any]: ...

    def run(self, names: list[str], feeds: dict[str, Any]) -> Sequence[Any]: ...


def session_options(threads: int = 0) -> ort.SessionOptions:
    """Return session options for an exported graph; with `threads` 0 ONNX Runtime chooses."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # spinning threads take cores from other programs (docs/inside/decisions.md)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # same as in edge.runtime.ort_session, so that the checked graph is the one that runs
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not cpu.has_vnni():
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def open_session(
    folder: str | Path, graph: bytes | None = None, options: ort.SessionOptions | None = None
) -> ort.InferenceSession:
    """Open a session on a bundle or build folder, whose top level has the weights."""
    folder = Path(folder).resolve()
    options = options or session_options()
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder)
    )
    data = (folder / GRAPH_FILE).read_bytes() if graph is None else graph
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def open_reference(folder: str | Path) -> ReferenceGraph:
    """Open the graph of a bundle or build folder with the reference ops."""
    return ReferenceGraph((Path(folder) / GRAPH_FILE).read_bytes(), folder)


@dataclass
class GraphState:
    """Arrays by input name (`layers.0.conv_state`, …), and the number of tokens consumed."""

    arrays: dict[str, NDArray[Any]]
    position: int = 0


@dataclass
class GraphRunner:
    """Runs a session on tokens [B, T]. Logits are [B, L, V]."""

    session: GraphSession
    config: ModelConfig
    names: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {i.name for i in self.session.get_inputs()}

    def initial(self, batch: int = 1, capacity: int = 0, fill: float = 0.0) -> GraphState:
        """Return zero states; KV caches hold `fill` until written."""
        arrays: dict[str, NDArray[Any]] = {}
        dims = {"B": batch, "capacity": capacity}
        for entry in self.session.get_inputs():
            if entry.name.startswith("layers.") and not entry.name.endswith("_log"):
                shape = [dims.get(dim, dim) for dim in entry.shape]
                start = fill if entry.name.endswith("_cache") else 0.0
                arrays[entry.name] = np.full(shape, start, _DTYPES[entry.type])
        return GraphState(arrays)

    def run(
        self,
        tokens: Tokens,
        state: GraphState,
        parents: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        kept: Sequence[int] | None = None,
    ) -> tuple[F32, list[GraphState]]:
        """Return logits of `rows` (default: all) and the state after each token in `kept` (default:
        the last), which must ascend.

        The run writes the KV caches of `state`, so the kept states of a tree share them. After a
        tree run, a state's `position` counts the tokens on its path.
        """
        kept = [tokens.shape[1] - 1] if kept is None else list(kept)
        feeds = self.feeds(tokens, state, parents, rows, kept)
        outputs = (o.name for o in self.session.get_outputs())
        names = [name for name in outputs if f"{name}_log" not in self.names]
        out = dict(zip(names, self.session.run(names, feeds), strict=True))
        if not all(isinstance(v, np.ndarray) for v in out.values()):
            raise ExportError("the graph returned something that is not an array")
        depths = _depths(_chain(tokens) if parents is None else parents)
        states = [
            GraphState(states_after(out, r), state.position + depths[token])
            for r, token in enumerate(kept)
        ]
        return np.ascontiguousarray(out["logits"].swapaxes(0, 1)), states

    def feeds(
        self,
        tokens: Tokens,
        state: GraphState,
        parents: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        kept: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Return the session's inputs for `run`: those that this graph has, and states."""
        steps = tokens.shape[1]
        tree = parents is not None
        parents = _chain(tokens) if parents is None else parents
        widths = self.config.conv_widths
        ancestors = np.zeros((steps, steps), np.float32)
        window = np.zeros((steps, max(widths, default=1)), np.int64)
        for t, parent in enumerate(parents):
            window[t, 0] = t
            if parent >= 0:
                ancestors[t] = ancestors[parent]
            ancestors[t, t] = 1
            for j in range(1, window.shape[1]):
                window[t, j] = parent
                parent = parents[parent] if parent >= 0 else parent - 1
        kept = [steps - 1] if kept is None else list(kept)
        total = state.position + steps
        inputs = {
            "tokens": np.ascontiguousarray(tokens.T.astype(np.int64)),
            "parents": np.array(parents, np.int64),
            "tree": np.array(tree),
            "last_only": np.array(not tree and kept == [steps - 1]),
            "ancestors": ancestors,
            "positions": np.array(_depths(parents), np.int64) + state.position - 1,
            "past": np.array([state.position], np.int64),
            "total": np.array(total, np.int32),
            "last": np.full(len(tokens), total - 1, np.int32),
            "rows": np.array(range(steps) if rows is None else rows, np.int64),
            "kept": np.array(kept, np.int64),
        }
        for width in widths:
            # negative indices point into the state, whose rows come first in the concatenation
            taps = window[:, :width][:, ::-1]
            inputs[f"taps{width}"] = taps + (width - 1)
            inputs[f"kept_taps{width}"] = taps[kept, 1:] + (width - 1)
        inputs["paths"], inputs["stored"] = inputs["ancestors"], inputs["kept"]
        return (
            {n: v for n, v in inputs.items() if n in self.names} | state.arrays | self._logs(tokens)
        )

    def _logs(self, tokens: Tokens) -> dict[str, NDArray[Any]]:
        """Return empty logs: the states already include all earlier tokens."""
        batch = tokens.shape[0]
        return {
            entry.name: np.zeros((0, batch, entry.shape[2]), _DTYPES[entry.type])
            for entry in self.session.get_inputs()
            if entry.name.endswith("_log")
        }


def _chain(tokens: Tokens) -> list[int]:
    return list(range(-1, tokens.shape[1] - 1))


def _depths(parents: Sequence[int]) -> list[int]:
    """Return the number of tokens of the run on each token's path."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def states_after(out: dict[str, Any], row: int) -> dict[str, NDArray[Any]]:
    """Return a run's states after kept token number `row`, by input name."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, array in out.items():
        if name.endswith("_states"):
            arrays[name[:-1]] = array[row]
        elif name.endswith("_cache_out"):
            arrays[name.removesuffix("_out")] = array
    return arrays
