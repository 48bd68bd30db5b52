"""What comes between the copy of a run's inputs to the device and the copy of its logits back.

The CUDA engine launches its plan (`launching`); another executor may do the same work otherwise.
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
    """Addresses on the device, by name.

    Attributes:
        inputs, values: of runs of one layout, see `StateRuns.spacious`.
        tensors: recurrent tensors, logs and caches of the state.
        arena: the memory that `values` are in.
    """

    inputs: Mapping[str, int]
    values: Mapping[str, int]
    tensors: Mapping[str, int]
    arena: Memory


class PreparedWork(Protocol):
    """A run of one size, with every address known."""

    @property
    def recordable(self) -> bool:
        """Whether `issue` may be recorded; asked after it was issued once where it `rehearses`."""
        ...

    def issue(self) -> None:
        """Give it to the device. Raises EngineError."""
        ...

    @property
    def finish(self) -> Callable[[ReplayStep], None] | None:
        """What differs from run to run and is not recorded; issued behind `issue`, each time."""
        ...


class Issuer(Protocol):
    """Prepares the runs of one state.

    Attributes:
        rehearses: a run is made once before it is recorded.
    """

    @property
    def rehearses(self) -> bool: ...

    def prepare(self, key: RunKey, places: Places, *, recorded: bool) -> PreparedWork:
        """The run `key` at these places; `recorded`: it will be, so it is asked for once.

        Raises BundleError, EngineError: sizes that cannot be run.
        """
        ...

    def moved(self) -> None:
        """The values of runs lie elsewhere from now on: what was prepared is not used again."""
        ...


class Executor(Protocol):
    """Runs a model on the engine's device.

    Attributes:
        plan: the programs.
        weights_bytes: device memory of the model's constants.
        scratch_bytes: device memory it has taken besides, once for all states.
        trees: it can run them.
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
        """Slots of a state's recurrent tensors."""
        ...

    def inputs(self, program: int) -> Mapping[str, Buffer]:
        """What the host writes before a run of the plan's program."""
        ...

    def values(self, runs: StateRuns, spacious: RunKey) -> Arena:
        """Places of the values of a spacious run: `logits`, `picked`, and what it needs itself."""
        ...

    def check(self, runs: StateRuns) -> None:
        """Raises EngineError: it cannot run states of these sizes."""
        ...

    def issuer(self, runs: StateRuns, state: DeviceState) -> Issuer:
        """Prepare for the runs of a state, of which it keeps no reference but to its memory."""
        ...
