"""What every mixer states about itself: tensors, states, memory. `edge.config` has the symbols.

A mixer is one file beside this one; its torch module, graph and rounding are the file of the same
name in `edge.export.mixers`. Nothing else asks which kind a layer is.
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
# Where a layer has norms: of what its mixer reads, of what that gives, or of both.
Norms = Literal["before", "behind", "both"]


class Frozen(BaseModel):
    """A config: immutable, without fields that nobody stated."""

    # what is part of a document is built with it, once
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Grown(Frozen):
    """A config that got fields later: where they hold their default they are not written, so that
    a runtime from before reads the models that it can run.
    """

    later: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def all_later(cls) -> set[str]:
        """Those of its bases too."""
        return {name for kind in cls.__mro__ for name in vars(kind).get("later", ())}

    @model_serializer(mode="wrap")
    def _as_before(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = written(self)
        fields = type(self).model_fields
        plain = {n for n in self.all_later() if getattr(self, n) == fields[n].default}
        return {name: value for name, value in data.items() if name not in plain}


class MixerConfig(Grown, ABC):
    """A layer's mixer: its sizes, and what follows from them.

    Attributes:
        kind: the name in JSON, and of the mixer's files.
        recurrent: it has a conv_state and an ssm_state; a short convolution has the first alone.
        attends: it has KV caches, which grow with the context.
        norms: x + mixer(norm(x)); or, `behind`, x + norm(mixer(x)); or `both`.
    """

    later: ClassVar[frozenset[str]] = frozenset({"norms"})

    kind: str
    norms: Norms = "before"
    recurrent: ClassVar[bool] = False
    attends: ClassVar[bool] = False

    @property
    def is_parallel(self) -> bool:
        """Whether it reads the residual stream as the layer before it did."""
        return False

    @property
    def is_aside(self) -> bool:
        """Whether the next layer reads what it gives, and the residual stream does not get it."""
        return False

    def input_width(self, d_model: int) -> int:
        """How wide its norm is: twice the stream where the embedded token lies beside it."""
        return d_model

    @property
    def conv_width(self) -> int | None:
        """K of its causal convolution, the field `d_conv`; None without one."""
        return getattr(self, "d_conv", None)

    @property
    def conv_channels(self) -> int:
        """Values of a token that its causal convolution reads."""
        return 0

    @property
    def looks_back(self) -> int | None:
        """How many positions its attention looks back on, the token's own among them; None: all."""
        return None

    @property
    def rotation(self) -> RopeConfig | None:
        """The rotary embedding of its queries and keys."""
        return None

    @property
    @abstractmethod
    def first_matrix(self) -> str:
        """The graph's matrix that reads the layer's normed input."""

    @abstractmethod
    def tensor_shapes(self, d_model: int) -> Shapes:
        """Canonical weight name → shape, in the order they are stored."""

    def read_share(self, module: str) -> float:
        """The share of a module's weights that one token reads."""
        return 1.0

    def recurrent_states(self, batch: int) -> Shapes:
        """`conv_state` and `ssm_state` → shape, batch first; here that of the convolution."""
        if self.conv_width is None:
            return {}
        return {"conv_state": (batch, self.conv_width - 1, self.conv_channels)}

    def kv_caches(self, capacity: int, batch: int) -> Shapes:
        """`key_cache` and `value_cache` → [batch, n_kv_heads, capacity, head_dim]."""
        return {}

    def log_widths(self) -> dict[str, int]:
        """What a replay of its recurrence reads of every token → how many values that is; here
        what the convolution reads.
        """
        return {} if self.conv_width is None else {"conv_in": self.conv_channels}

    @abstractmethod
    def workspace(self, tokens: int, capacity: int) -> int:
        """About how many fp32 values a run of `tokens` holds at once, for each of them."""


def linear_shapes(name: str, rows: int, columns: int, bias: bool) -> Shapes:
    """A weight [rows, columns], and a bias [rows] where there is one."""
    shapes: Shapes = {f"{name}.weight": (rows, columns)}
    if bias:
        shapes[f"{name}.bias"] = (rows,)
    return shapes


def refuse_all(faults: Iterable[str | None]) -> None:
    """Raise one ValueError that lists every fault; None is no fault."""
    found = [fault for fault in faults if fault]
    if found:
        raise ValueError("; ".join(found))
