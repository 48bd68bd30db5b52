"""What every engine offers, and which engines there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edge.config import ModelConfig
from edge.errors import EngineError
from edge.runtime.state import State

if TYPE_CHECKING:
    from edge.bundle import Bundle

Rows = Literal["last", "all"] | Sequence[int]

DEFAULT_WINDOW = 8
MAX_WINDOW = 256

# what is missing before each can be chosen
UNAVAILABLE = {
    "cuda": "it needs a bundle with compiled kernels and the cuda-core package",
    "tensorrt": "it needs TensorRT and an engine built on this device",
}


@runtime_checkable
class Engine(Protocol):
    """Runs a model's graph over states it has made.

    Attributes:
        name: `ort`, `cuda` or `tensorrt`.
        chunk: most tokens of one committing run.
    """

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def chunk(self) -> int: ...

    def new_state(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> State:
        """A cleared state of `batch` sequences with everything its runs need, allocated now.

        `window`: most tokens of a run that can be taken back. `capacity`: tokens the KV caches
        hold; None is the trained context, at most 4096; ignored without attention.
        Raises InputError for sizes out of range, StateError without memory.
        """
        ...

    def run(
        self,
        tokens: NDArray[np.int64],
        state: State,
        *,
        parents: Sequence[int] | None = None,
        rows: Rows = "last",
        commit: bool = False,
    ) -> NDArray[np.float32]:
        """Run tokens [B, T] from the live state on; logits [B, L, V] of the `rows` asked for.

        Without `commit` T is at most the window and every token can be taken back. With it T is at
        most `chunk` and only the state after the last token is kept. `parents` makes the tokens a
        tree: parents[t] < t is the token before t, -1 the live state; `state.select(node)` must
        follow. `rows`: "last", "all", or token indices in the order wanted.

        The logits are a view of memory the state owns, valid until its next run.

        Raises InputError (ids, shapes, tree, rows), ContextFullError (KV caches), StateError (a
        state of another engine, a tree waiting for `select`), EngineError (another thread, a forked
        process, logits that are not finite, a failure inside). Whatever is raised, the state is
        where it was; only `reach` may be shorter.
        """
        ...

    def memory_plan(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> dict[str, int]:
        """Bytes by purpose, for one state of these sizes (`edge.runtime.memory`)."""
        ...


def choose_engine(name: str) -> str:
    """The engine that `name` means here. Raises EngineError for one that cannot run."""
    if name in ("auto", "ort"):
        return "ort"
    if name in UNAVAILABLE:
        raise EngineError(
            f"engine {name} is not available in this version: {UNAVAILABLE[name]}",
            field="engine",
            remedy="use --engine ort",
        )
    raise EngineError(
        f"there is no engine {name!r}", field="engine", remedy="auto, ort, cuda or tensorrt"
    )


def open_engine(
    bundle: Bundle, name: str = "auto", *, threads: int | None = None, spin: bool = False
) -> Engine:
    """Load a bundle's graph into the engine called `name`.

    `threads` None is one per physical core this process may use. `spin`: threads wait for work
    awake, quicker on a machine that does nothing else and far slower beside other work. Raises
    BundleError, EngineError.
    """
    choose_engine(name)
    from edge.runtime.ort import OrtEngine

    return OrtEngine.from_bundle(bundle, threads=threads, spin=spin)
