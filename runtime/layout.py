"""Which state tensors a model carries and how one of their slots is shaped."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.config import ModelConfig
from edge.launch import DType, Log
from edge.tensors import kv_cache_shapes, kv_windows, padded_head_dim, recurrent_state_shapes

if TYPE_CHECKING:
    from edge.bundle import Bundle

Shape = tuple[int, ...]
# of an array: shape and type
ArrayType = tuple[Shape, np.dtype[Any]]

DEFAULT_CAPACITY = 4096
# the types of a launch plan and of logs as numpy has them
NUMPY: Mapping[DType, np.dtype[Any]] = {
    "f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
}  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """What a state belongs to: three fingerprints, compared when states meet.

    Attributes:
        model: of what a state depends on: config, types of states, graph and weights. What else a
            bundle says of itself, a README or who made it, is no part of it.
        quantization: name of the recipe.
        tokenizer: of the tokenizer, "" where none is known.
        bundle: of the whole bundle, which earlier versions saved as `model`; "" for a bare graph.
    """

    model: str
    quantization: str = ""
    tokenizer: str = ""
    bundle: str = field(default="", compare=False)

    @staticmethod
    def of_bundle(bundle: Bundle) -> Identity:
        """The identity of a bundle's states, whichever engine runs it."""
        manifest = bundle.manifest
        graphs = {manifest.graphs.get("ort") or min(manifest.graphs.values(), default="")}
        depends = {
            # by the manifest's own serializer: that of the part alone would have to be built
            "config": manifest.model_dump(mode="json", include={"model"})["model"],
            "states": dict(manifest.state_dtypes),
            "files": {
                entry.path: entry.sha256
                for entry in manifest.files
                if entry.path in graphs or entry.path.endswith(".bin")
            },
        }
        data = json.dumps(depends, sort_keys=True).encode()
        return Identity(
            model=hashlib.sha256(data).hexdigest(),
            bundle=bundle.fingerprint,
            quantization=manifest.quantization.recipe,
            tokenizer=manifest.tokenizer.sha256 or manifest.tokenizer.kind,
        )

    @staticmethod
    def of_graph(config: ModelConfig, graph: bytes) -> Identity:
        """The identity of a graph without a bundle around it."""
        digest = hashlib.sha256(config.model_dump_json().encode() + b"\0" + graph)
        return Identity(model=digest.hexdigest())


@dataclass(frozen=True)
class StateLayout:
    """Names, shapes and types of a model's state for one batch size and KV capacity.

    Attributes:
        recurrent: input name → shape of one slot; convolution states [K-1, B, C] (time first, as
            the graph reads them), scan states [B, …].
        caches: input name → [B, KV heads, capacity, padded head_dim].
        batch: B.
        capacity: tokens the KV caches hold; 0 without attention.
        dtypes: input name → "float16" or "int8" of those that are not fp32. A zero is 0 in all.
        logs: input name → what one token's row of it is: what the scans whose states are not kept
            for every token read. No part of a snapshot.
        windows: cache → positions that a token looks back on in it, its own among them; those of
            layers that look back on all are not here.
        slots: tokens that the caches of `windows` hold where they slide; None where they hold
            `capacity` as the others do.
    """

    recurrent: dict[str, Shape]
    caches: dict[str, Shape]
    batch: int
    capacity: int
    dtypes: Mapping[str, str] = field(default_factory=dict)
    logs: Mapping[str, Log] = field(default_factory=dict)
    windows: Mapping[str, int] = field(default_factory=dict)
    slots: int | None = None

    @staticmethod
    def of(
        config: ModelConfig,
        *,
        batch: int = 1,
        capacity: int | None = None,
        dtypes: Mapping[str, str] | None = None,
        logs: Mapping[str, Log] | None = None,
    ) -> StateLayout:
        """`capacity` None is the trained context, 4096 tokens where that is longer or unknown.

        `dtypes`: a manifest's `state_dtypes`; `logs`: its `scan_logs`.
        """
        if not config.has_attention:
            capacity = 0
        elif capacity is None:
            capacity = min(config.max_context or DEFAULT_CAPACITY, DEFAULT_CAPACITY)
        recurrent = {}
        for name, shape in recurrent_state_shapes(config, batch).items():
            if name.endswith(".conv_state"):
                shape = (shape[1], shape[0], shape[2])
            recurrent[name] = shape
        caches = {
            name: (*shape[:3], padded_head_dim(shape[3]))
            for name, shape in kv_cache_shapes(config, capacity, batch).items()
        }
        windows = kv_windows(config)
        return StateLayout(recurrent, caches, batch, capacity, dtypes or {}, logs or {}, windows)

    def sliding(self, *, window: int, chunk: int) -> StateLayout:
        """The same state with caches that slide, where that is less than the whole context.

        A run of T tokens needs what its first token looks back on, were `window` tokens taken back,
        and T slots. Room for as much again lets what is needed move to the front without touching
        what is needed before it has moved, and seldom.
        """
        longest = max(chunk, window)
        slots = 2 * (self.looks_back - 1 + window) + longest
        if not self.windows or slots >= self.capacity:
            return self
        caches = {
            name: (*s[:2], slots, s[3]) if name in self.windows else s
            for name, s in self.caches.items()
        }
        return replace(self, caches=caches, slots=slots)

    @property
    def looks_back(self) -> int:
        """The most positions that a token looks back on in a cache with a window."""
        return max(self.windows.values(), default=1)

    def slides(self, name: str) -> bool:
        """Whether this cache forgets the oldest tokens."""
        return self.slots is not None and name in self.windows

    def with_batch(self, batch: int) -> StateLayout:
        """The same state for another number of sequences."""
        recurrent = {}
        for name, shape in self.recurrent.items():
            axis = batch_axis(name)
            recurrent[name] = (*shape[:axis], batch, *shape[axis + 1 :])
        caches = {name: (batch, *shape[1:]) for name, shape in self.caches.items()}
        return replace(self, recurrent=recurrent, caches=caches, batch=batch)

    @property
    def based(self) -> frozenset[str]:
        """Recurrent tensors that are kept for some tokens only: the scan states of layers with
        logs.
        """
        # `layers.0.x_log` is of `layers.0`
        layers = {tuple(name.split(".")[:2]) for name in self.logs}
        return frozenset(".".join((*layer, "ssm_state")) for layer in layers)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Type of one tensor's values."""
        return np.dtype(self.dtypes.get(name, "float32"))

    def bytes_of(self, name: str, shape: Shape) -> int:
        """What `shape` values of this tensor take."""
        return self.dtype(name).itemsize * math.prod(shape)

    def rows(self, name: str, count: int) -> ArrayType:
        """`count` rows of a log: shape and type."""
        log = self.logs[name]
        return (count, self.batch, log.width), NUMPY[log.dtype]

    def kept(self, slots: int, bases: int, rows: int) -> dict[str, ArrayType]:
        """Arrays of this many slots, based slots and log rows: name → shape, the count first, and
        type.
        """
        based = self.based
        out: dict[str, ArrayType] = {
            name: ((bases if name in based else slots, *shape), self.dtype(name))
            for name, shape in self.recurrent.items()
        }
        return out | {name: self.rows(name, rows) for name in self.logs}

    @property
    def slot_bytes(self) -> int:
        """Bytes of one recurrent state: what a snapshot costs besides its KV rows."""
        return sum(self.bytes_of(name, shape) for name, shape in self.recurrent.items())

    @property
    def cache_bytes(self) -> int:
        return sum(self.bytes_of(name, shape) for name, shape in self.caches.items())

    @property
    def growing_bytes(self) -> int:
        """Of these, what a longer context takes more of: not those of caches that slide."""
        return sum(self.bytes_of(n, s) for n, s in self.caches.items() if not self.slides(n))

    @property
    def looked_at_bytes(self) -> int:
        """What a token of a full context reads of the KV caches."""
        rows = {n: min(self.capacity, self.windows.get(n, self.capacity)) for n in self.caches}
        return sum(
            self.bytes_of(name, (s[0], s[1], rows[name], s[3])) for name, s in self.caches.items()
        )

    def needed(self, length: int) -> int:
        """Of `length` tokens, how many the next one may look back on in a cache with a window."""
        return min(length, self.looks_back - 1)

    def cache_shapes(self, length: int, *, whole: bool | None = None) -> dict[str, Shape]:
        """Shapes of the KV caches' rows that a copy of the state after `length` tokens has: all, or
        the last that are needed. `whole`: all of every cache; None where these do not slide.
        """
        whole = self.slots is None if whole is None else whole
        rows = {n: length if whole or n not in self.windows else self.needed(length)
                for n in self.caches}  # fmt: skip
        return {name: (s[0], s[1], rows[name], s[3]) for name, s in self.caches.items()}


def packed(sizes: Mapping[str, int], alignment: int) -> tuple[dict[str, int], int]:
    """Offsets of parts of these sizes, one behind the other, each on a multiple of `alignment`
    bytes; and the bytes of all.
    """
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // alignment) * alignment
    return offsets, total


def batch_axis(name: str) -> int:
    """The axis of the batch in a slot of this tensor."""
    return 1 if name.endswith(".conv_state") else 0
