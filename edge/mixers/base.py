"""The interface of a mixer: its tensors, states and memory. `edge.config` has the symbols.

Each mixer is one file in this folder; its torch module, graph and rounding are in the file of the
same name in `edge.export.mixers`. No other code depends on the kind of a layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

if TYPE_CHECKING:
    from edge.mixers.attention import RopeConfig

Positive = Annotated[int, Field(gt=0, le=1 << 31)]
Shapes = dict[str, tuple[int, ...]]
# Where a layer has norms: of the mixer's input, of its output, or of both.
Norms = Literal["before", "behind", "both"]


class Frozen(BaseModel):
    """A config: immutable, and without unknown fields."""

    # defer_build: a validator is built once, with that of the document it is part of
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Grown(Frozen):
    """A config that gained fields over time, listed in `later`.

    They are not written at their default, so that older runtimes read the models they can run.
    """

    later: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def all_later(cls) -> set[str]:
        """Return the later fields of this class and its bases."""
        return {name for kind in cls.__mro__ for name in vars(kind).get("later", ())}

    @model_serializer(mode="wrap")
    def _omit_later_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        fields = type(self).model_fields
        omitted = {n for n in self.all_later() if getattr(self, n) == fields[n].default}
        return {name: value for name, value in data.items() if name not in omitted}


class MixerConfig(Grown, ABC):
    """A layer's mixer: its sizes, and what follows from them.

    Attributes:
        kind: name in JSON, and of the mixer's files.
        recurrent: whether it has both a conv_state and an ssm_state; a short convolution has only
            the former.
        attends: whether it has KV caches, which grow with the context.
        norms: `before` is x + mixer(norm(x)), `behind` is x + norm(mixer(x)), `both` has two.
    """

    later: ClassVar[frozenset[str]] = frozenset({"norms"})

    kind: str
    norms: Norms = "before"
    recurrent: ClassVar[bool] = False
    attends: ClassVar[bool] = False

    @property
    def is_parallel(self) -> bool:
        """Whether the layer reads the same residual stream as the layer before it."""
        return False

    @property
    def is_aside(self) -> bool:
        """Whether the output goes to the next layer and not to the residual stream."""
        return False

    def input_width(self, d_model: int) -> int:
        """Return the width of the input: 2·d_model if it includes the embedded token."""
        return d_model

    @property
    def conv_width(self) -> int | None:
        """Width K of the causal convolution, the field `d_conv`; None without one."""
        return getattr(self, "d_conv", None)

    @property
    def conv_channels(self) -> int:
        """Number of channels of the causal convolution."""
        return 0

    @property
    def looks_back(self) -> int | None:
        """Number of positions a token attends to, its own included; None means all."""
        return None

    @property
    def rotation(self) -> RopeConfig | None:
        """RoPE of the queries and keys, or None."""
        return None

    @property
    @abstractmethod
    def first_matrix(self) -> str:
        """Name of the graph's matrix that reads the layer's normed input."""

    @abstractmethod
    def tensor_shapes(self, d_model: int) -> Shapes:
        """Return canonical weight name → shape, in storage order."""

    def read_share(self, module: str) -> float:
        """Return the share of a module's weights that one token reads."""
        return 1.0

    def recurrent_states(self, batch: int) -> Shapes:
        """Return `conv_state` and `ssm_state` → shape, batch first; here conv_state alone."""
        if self.conv_width is None:
            return {}
        return {"conv_state": (batch, self.conv_width - 1, self.conv_channels)}

    def kv_caches(self, capacity: int, batch: int) -> Shapes:
        """Return `key_cache` and `value_cache` → [batch, n_kv_heads, capacity, head_dim]."""
        return {}

    def log_widths(self) -> dict[str, int]:
        """Return log name → number of values per token that a replay of the recurrence reads; here
        the convolution's input alone.
        """
        return {} if self.conv_width is None else {"conv_in": self.conv_channels}

    @abstractmethod
    def workspace(self, tokens: int, capacity: int) -> int:
        """Estimate the fp32 values per token that a run of `tokens` holds at once."""


def linear_shapes(name: str, rows: int, columns: int, bias: bool) -> Shapes:
    """Return the shapes of a weight [rows, columns] and, with `bias`, a bias [rows]."""
    shapes: Shapes = {f"{name}.weight": (rows, columns)}
    if bias:
        shapes[f"{name}.bias"] = (rows,)
    return shapes


def refuse_all(faults: Iterable[str | None]) -> None:
    """Raise one ValueError that lists every fault, if there are any. None is no fault."""
    messages = [fault for fault in faults if fault]
    if messages:
        raise ValueError("; ".join(messages))
