"""Interface of executors: the work between copying a run's inputs in and copying its logits out.

The CUDA engine launches its plan (`launching`); TensorRT runs a compiled graph instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from edge.launch import Buffer, LaunchPlan
from edge.runtime.cuda.device import Memory
from edge.runtime.ledger import ReplayStep

if TYPE_CHECKING:
    from edge.runtime.cuda.runs import Arena, RunKey, StateRuns
    from edge.runtime.cuda.state import DeviceState


class Places(NamedTuple):
    """Device addresses by name.

    Attributes:
        inputs, values: addresses for all runs of one layout; see `StateRuns.spacious`.
        tensors: addresses of the state's recurrent tensors, logs and caches.
        arena: memory that holds the `values`.
    """

    inputs: Mapping[str, int]
    values: Mapping[str, int]
    tensors: Mapping[str, int]
    arena: Memory


class PreparedWork(Protocol):
    """A run of one size with every address resolved."""

    @property
    def recordable(self) -> bool:
        """Whether `issue` may be recorded. With `rehearses`, read only after the first `issue`."""
        ...

    def issue(self) -> None:
        """Issue the run to the device. Raises EngineError."""
        ...

    @property
    def finish(self) -> Callable[[ReplayStep], None] | None:
        """Unrecorded work that differs from run to run; called after every `issue` or replay."""
        ...


class Issuer(Protocol):
    """Prepares the runs of one state.

    Attributes:
        rehearses: whether a run must execute once before it is recorded.
    """

    @property
    def rehearses(self) -> bool: ...

    def prepare(self, key: RunKey, places: Places, *, recorded: bool) -> PreparedWork:
        """Prepare the run `key` at these addresses. `recorded`: the caller will record it.

        Raises BundleError or EngineError for unsupported sizes.
        """
        ...

    def moved(self) -> None:
        """Drop cached addresses: the values have moved, and prepared runs are not used again."""
        ...


class Executor(Protocol):
    """Runs a model on the engine's device.

    Attributes:
        plan: launch plan of the model.
        weights_bytes: device memory of the model's constants.
        scratch_bytes: other device memory, shared by all states.
        trees: whether draft trees are supported.
    """

    @property
    def plan(self) -> LaunchPlan: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def scratch_bytes(self) -> int: ...

    @property
    def trees(self) -> bool: ...

    def state_slots(self, window: int) -> int:
        """Return the number of slots of a state's recurrent tensors."""
        ...

    def inputs(self, program: int) -> Mapping[str, Buffer]:
        """Return the buffers that the host writes before a run of the program."""
        ...

    def values(self, runs: StateRuns, spacious: RunKey) -> Arena:
        """Place the values of a spacious run: `logits`, `picked` and the executor's own."""
        ...

    def check(self, runs: StateRuns) -> None:
        """Raise EngineError if states of these sizes are not supported."""
        ...

    def issuer(self, runs: StateRuns, state: DeviceState) -> Issuer:
        """Return the issuer of a state's runs. It may keep the state's memory, not the state."""
        ...
