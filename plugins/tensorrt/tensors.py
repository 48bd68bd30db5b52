"""Every tensor of the device graph: its type, and its dimensions as numbers and symbols.

T tokens of the run · B sequences · L wanted rows · C capacity of the KV caches · S log slots ·
P entries of `replay` · A 1 for a chain, T for a tree
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.errors import ExportError
from edge.launch import DType, host_inputs
from edge.plugins.lowering.plan import PICKED, Lowered, taps
from edge.plugins.tensorrt import OUT


@dataclass(frozen=True)
class Tensor:
    """Type and dimensions."""

    dtype: DType
    dims: tuple[int | str, ...]


class Tensors:
    """By name: constants, what the host writes before a run, states, logs, caches, values.

    The memory of a state, log or cache after the run is named as it is before, and `.out`.
    """

    def __init__(self, lowered: Lowered) -> None:
        graph, tables, _ = lowered
        self._found = {n: Tensor(c.dtype, c.shape) for n, c in graph.constants.items()}
        lists = host_inputs(taps(graph), graph.rotations)
        self._found |= {name: Tensor(dtype, dims) for name, (dtype, dims) in lists.items()}
        self._found |= {
            n: Tensor(log.dtype, ("S", "B", log.width)) for n, log in tables.logs.items()
        }
        for name, (dtype, shape) in graph.inputs.items():
            if name.endswith(("conv_state", "ssm_state")):
                self._found[name] = Tensor(dtype, (2, *shape))
            elif name.endswith(("key_cache", "value_cache")):
                batch, heads, _, width = shape
                self._found[name] = Tensor(dtype, (batch, heads, "C", width))
        for name, buffer in tables.values.items():
            dims = (*buffer.elements.of, buffer.elements.times)
            self._found[name] = Tensor(buffer.dtype, dims[:2] if name == PICKED else dims)

    def __getitem__(self, name: str) -> Tensor:
        """Raises ExportError: there is none of that name."""
        found = self._found.get(name) or self._found.get(name.removesuffix(OUT))
        if found is None:
            raise ExportError(f"the device graph has no tensor {name!r}", field=name)
        return found
