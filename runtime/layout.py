"""The state tensors of a model and the shapes of their slots."""

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
# shape and dtype of an array
ArrayType = tuple[Shape, np.dtype[Any]]

DEFAULT_CAPACITY = 4096
# dtypes of launch plans and logs → numpy dtypes
NUMPY: Mapping[DType, np.dtype[Any]] = {
    "f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
}  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """Fingerprints of the model that a state belongs to, compared before states are combined.

    Attributes:
        model: SHA-256 of everything the state depends on: config, state dtypes, graph and weights.
            Other contents of the bundle, such as a README or its author, do not count.
        quantization: name of the recipe.
        tokenizer: fingerprint of the tokenizer, "" if unknown.
        bundle: fingerprint of the whole bundle, which earlier versions saved as `model`; "" for a
            bare graph.
    """

    model: str
    quantization: str = ""
    tokenizer: str = ""
    bundle: str = field(default="", compare=False)

    @staticmethod
    def of_bundle(bundle: Bundle) -> Identity:
        """Return the identity of a bundle's states, the same for every engine."""
        manifest = bundle.manifest
        graphs = {manifest.graphs.get("ort") or min(manifest.graphs.values(), default="")}
        content = {
            # the manifest's own serializer: pydantic would have to build one for the part alone
            "config": manifest.model_dump(mode="json", include={"model"})["model"],
            "states": dict(manifest.state_dtypes),
            "files": {
                entry.path: entry.sha256
                for entry in manifest.files
                if entry.path in graphs or entry.path.endswith(".bin")
            },
        }
        data = json.dumps(content, sort_keys=True).encode()
        return Identity(
            model=hashlib.sha256(data).hexdigest(),
            bundle=bundle.fingerprint,
            quantization=manifest.quantization.recipe,
            tokenizer=manifest.tokenizer.sha256 or manifest.tokenizer.kind,
        )

    @staticmethod
    def of_graph(config: ModelConfig, graph: bytes) -> Identity:
        """Return the identity of a graph without a bundle."""
        digest = hashlib.sha256(config.model_dump_json().encode() + b"\0" + graph)
        return Identity(model=digest.hexdigest())


@dataclass(frozen=True)
class StateLayout:
    """Names, shapes and dtypes of a model's state for one batch size and KV capacity.

    Attributes:
        recurrent: input name → shape of one slot; convolution states [K-1, B, C] (time first, as
            the graph reads them), scan states [B, …].
        caches: input name → [B, KV heads, capacity, padded head_dim].
        batch: number of sequences, B.
        capacity: number of tokens the KV caches hold; 0 without attention.
        dtypes: input name → "float16" or "int8", for tensors that are not fp32. Zero is stored as 0
            in all of them.
        logs: input name → type of one token's row: the inputs of scans whose states are not stored
            at every token. Not part of a snapshot.
        windows: cache → number of positions a token attends to in it, its own included. Caches of
            layers with full attention are absent.
        slots: number of tokens that the caches in `windows` hold if they slide; None if they hold
            `capacity` tokens like the others.
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
        """Return the layout of a model's state.

        `capacity` None is the trained context, or 4096 tokens if that is longer or unknown.
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
        """Return the layout with sliding caches, if they take less than the full context.

        A run of T tokens needs T slots plus the positions its first token attends to, even after
        `window` tokens are rewound. Twice the room for those positions lets them move to the front
        without overwriting rows that are still to be moved, and makes moves rare.
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
        """Maximum number of positions a token attends to in a cache with a window."""
        return max(self.windows.values(), default=1)

    def slides(self, name: str) -> bool:
        """Return whether this cache drops the oldest tokens."""
        return self.slots is not None and name in self.windows

    def with_batch(self, batch: int) -> StateLayout:
        """Return the layout for a different number of sequences."""
        recurrent = {}
        for name, shape in self.recurrent.items():
            axis = batch_axis(name)
            recurrent[name] = (*shape[:axis], batch, *shape[axis + 1 :])
        caches = {name: (batch, *shape[1:]) for name, shape in self.caches.items()}
        return replace(self, recurrent=recurrent, caches=caches, batch=batch)

    @property
    def based(self) -> frozenset[str]:
        """Recurrent tensors stored only at some tokens: the scan states of layers with logs."""
        # `layers.0.x_log` belongs to `layers.0`
        layers = {tuple(name.split(".")[:2]) for name in self.logs}
        return frozenset(".".join((*layer, "ssm_state")) for layer in layers)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of a tensor."""
        return np.dtype(self.dtypes.get(name, "float32"))

    def bytes_of(self, name: str, shape: Shape) -> int:
        """Return the bytes that an array of this tensor's dtype and this shape takes."""
        return self.dtype(name).itemsize * math.prod(shape)

    def rows(self, name: str, count: int) -> ArrayType:
        """Return shape and dtype of `count` rows of a log."""
        log = self.logs[name]
        return (count, self.batch, log.width), NUMPY[log.dtype]

    def kept(self, slots: int, bases: int, rows: int) -> dict[str, ArrayType]:
        """Return name → array type, for the given numbers of slots, bases and log rows.

        The number is the first axis of each shape.
        """
        based = self.based
        arrays: dict[str, ArrayType] = {
            name: ((bases if name in based else slots, *shape), self.dtype(name))
            for name, shape in self.recurrent.items()
        }
        return arrays | {name: self.rows(name, rows) for name in self.logs}

    @property
    def slot_bytes(self) -> int:
        """Bytes of one recurrent state, which is a snapshot without its KV rows."""
        return sum(self.bytes_of(name, shape) for name, shape in self.recurrent.items())

    @property
    def cache_bytes(self) -> int:
        return sum(self.bytes_of(name, shape) for name, shape in self.caches.items())

    @property
    def growing_bytes(self) -> int:
        """The part of `cache_bytes` that grows with the capacity: caches that do not slide."""
        return sum(self.bytes_of(n, s) for n, s in self.caches.items() if not self.slides(n))

    @property
    def looked_at_bytes(self) -> int:
        """Bytes of KV cache that one token of a full context reads."""
        rows = {n: min(self.capacity, self.windows.get(n, self.capacity)) for n in self.caches}
        return sum(
            self.bytes_of(name, (s[0], s[1], rows[name], s[3])) for name, s in self.caches.items()
        )

    def needed(self, length: int) -> int:
        """Return how many of `length` tokens the next one may attend to in a windowed cache."""
        return min(length, self.looks_back - 1)

    def cache_shapes(self, length: int, *, whole: bool | None = None) -> dict[str, Shape]:
        """Return the shapes of the KV rows in a copy of the state after `length` tokens.

        With `whole` these are all rows of every cache, otherwise only the needed rows of windowed
        caches. None means whole unless the caches slide.
        """
        whole = self.slots is None if whole is None else whole
        rows = {n: length if whole or n not in self.windows else self.needed(length)
                for n in self.caches}  # fmt: skip
        return {name: (s[0], s[1], rows[name], s[3]) for name, s in self.caches.items()}


def packed(sizes: Mapping[str, int], alignment: int) -> tuple[dict[str, int], int]:
    """Lay out parts of these sizes one after another, each aligned to `alignment` bytes.

    Returns the offset of each part and the total size.
    """
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // alignment) * alignment
    return offsets, total


def batch_axis(name: str) -> int:
    """Return the batch axis in a slot of this tensor."""
    return 1 if name.endswith(".conv_state") else 0
