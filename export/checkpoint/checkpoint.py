"""An opened checkpoint: its config, and its tensors, one at a time, by canonical name."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edge.bundle import Manifest
from edge.config import ModelConfig
from edge.errors import CheckpointError, EdgeError
from edge.export.checkpoint.fields import Fields, read_json
from edge.export.checkpoint.files import (
    MAX_TEMPLATE_BYTES,
    MAX_TEXT_BYTES,
    check_file,
    leads_out,
)
from edge.export.checkpoint.layout import Layout, TensorPlace, elements
from edge.export.checkpoint.weights import CheckpointWeights
from edge.tensors import tensor_shapes

SCAN = 1 << 24  # elements scanned for NaN at a time: bounds what the scan allocates
READ = 1 << 22
MODEL_CARD = "README.md"
TOKENIZER_MODEL = "tokenizer.model"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tekken.json",
)
_MODEL_FILE = re.compile(r".*\.model(\.v[0-9]+[a-z0-9]*)?")  # Mistral's tokenizer.model.v3
INTEGER_BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


class Checkpoint:
    """A checkpoint directory whose headers fit its config. Tensors are read on demand.

    Attributes:
        path: the directory.
        family: name of the reader that accepted it (`mamba`, `llama`, …: `Family.name`).
        config: the model's config.
        source_config: config.json, unchanged.
        tokenizer_files: tokenizer, chat template and generation files that exist.
        generation: `eos_token_ids` (a list), `bos_token_id`, `pad_token_id`, each only if the
            checkpoint states it; generation_config.json takes precedence over config.json.
        manifest: manifest of a bundle in place of the checkpoint, or None.
        stated_licence: licence stated in the weights' file, or None.
        no_tokenizer: error that explains why its tokenizer is unusable, or None.
        unknown_fields: fields of config.json that no reader knows.
    """

    manifest: Manifest | None = None
    stated_licence: str | None = None
    no_tokenizer: EdgeError | None = None
    unknown_fields: tuple[str, ...] = ()

    def __init__(
        self,
        path: Path,
        family: str,
        source_config: dict[str, Any],
        layout: Layout,
        weights: CheckpointWeights,
    ) -> None:
        self.path = path
        self.family = family
        self.source_config = source_config
        self.config: ModelConfig = layout.config
        self._layout = layout
        self._weights = weights
        self._stored = _stored_names(layout, weights)
        layout.find(self._stored)
        _check_headers(path, layout, weights, self._stored)
        self._check_tied_heads()
        self.tokenizer_files = _tokenizer_files(path)
        self.generation = _generation(path, source_config, self.config.vocab_size)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (canonical name, tensor) in canonical order, one at a time; see `tensor`.

        Raises CheckpointError at the first tensor that holds NaN or infinity.
        """
        for name in tensor_shapes(self.config):
            yield name, self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by canonical name: contiguous, on the CPU, in the stored dtype, or in
        fp32 if its values are computed.

        It may be mapped from the file, so copy it before changing it. Raises CheckpointError if it
        holds NaN or infinity, and KeyError for a name that the config does not have.
        """
        if name in self._layout.constants:
            return torch.full(tensor_shapes(self.config)[name], self._layout.constants[name])
        piece = self._layout.pieces[name]
        stored = self._stored[piece.source]
        if piece.blocks:
            tensor = self._assemble_blocks(piece)
        else:
            parts = [
                taken(self._weights.read(self._stored[source]), piece) for source in piece.sources
            ]
            whole = parts[0] if len(parts) == 1 else torch.stack(parts)
            tensor = whole.reshape(piece.shape).contiguous()
        if piece.adapter:
            up, down = (self._weights.read(self._stored[part.name]) for part in piece.adapter)
            tensor = (
                tensor.float() + taken(up, piece).reshape(-1, up.shape[1]).float() @ down.float()
            )
        if piece.behind:
            tensor = self._weights.read(self._stored[piece.behind.name]).float() @ tensor.float()
        non_finite = _count_not_finite(tensor)
        if non_finite:
            raise CheckpointError(
                f"{non_finite} of {tensor.numel()} values are NaN or infinite",
                file=self._weights.entries[stored].file, field=stored,
                remedy="take the checkpoint from before training diverged, or download it again",
            )  # fmt: skip
        if piece.plus:
            tensor = tensor.float() + piece.plus
        if piece.factors:
            tensor = tensor.float().clone()
            for first, stop, factor in piece.factors:
                tensor[first:stop] *= factor
        return tensor

    def _assemble_blocks(self, piece: TensorPlace) -> Tensor:
        stored = self._weights.entries[self._stored[piece.source]]
        tensor = torch.zeros(piece.shape, dtype=stored.dtype)
        for block in piece.blocks:
            part = self._weights.read(self._stored[block.source.name])
            block.within(tensor).copy_(part.flatten(0, -2)[list(block.rows)])
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.tensor(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, by canonical name, without reading it."""
        if name in self._layout.constants or self._layout.pieces[name].computed:
            return torch.float32
        dtype = self._weights.entries[self._stored[self._layout.pieces[name].source]].dtype
        assert dtype is not None, "refused when opened"
        return dtype

    @property
    def card(self) -> Path | None:
        """The model card, or None."""
        card = self.path / MODEL_CARD
        return card if card.is_file() and not leads_out(card) else None

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint's files, excluding subfolders."""
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())

    def fingerprint(self) -> str:
        """Return the SHA-256, in hex, of config.json and all weight files: names, sizes, bytes."""
        total = hashlib.sha256()
        for path in [config_file(self.path), *self._weights.files]:
            content = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(READ):
                    content.update(block)
            total.update(f"{path.name}\0{content.hexdigest()}\n".encode())
        return total.hexdigest()

    def _check_tied_heads(self) -> None:
        embedding = self._stored[self._layout.pieces["embedding.weight"].source]
        for head in self._layout.tied_heads:
            if head in self._stored and not _same_bits(
                self._weights.read(self._stored[head]), self._weights.read(embedding)
            ):
                raise CheckpointError(
                    "differs from the embedding, though the config ties them",
                    file=self._weights.entries[self._stored[head]].file, field=head,
                    remedy="if the head was trained apart, set tie_word_embeddings, or "
                    "tie_embeddings in state-spaces, to false in config.json",
                )  # fmt: skip


def taken(whole: Tensor, piece: TensorPlace) -> Tensor:
    """Return the part of a source tensor that belongs to a canonical tensor, with the source's
    axes. It is a view unless rows are shared.
    """
    if piece.rows:
        return whole[list(piece.rows)]
    if piece.stack:
        return whole
    if piece.block and len(piece.shape) == 3:  # rows of each matrix of a stack
        whole = whole.flatten(0, 1)
    rows = piece.block or elements(piece.shape) // elements(piece.source_shape[1:])
    period = piece.period or whole.shape[0]
    return whole.unflatten(0, (-1, period))[:, piece.start : piece.start + rows]


def as_stored(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert canonical tensors to source tensors, as a checkpoint of this layout stores them."""
    stored: dict[str, Tensor] = {}
    for name, piece in layout.pieces.items():
        tensor = tensors[name]
        if piece.factors:
            tensor = tensor.clone()
            for first, stop, factor in piece.factors:
                tensor[first:stop] /= factor
        tensor = tensor - piece.plus if piece.plus else tensor
        if piece.stack:
            stored |= zip(piece.stack, tensor.unbind(), strict=True)
            continue
        for block in piece.blocks:
            source = stored.setdefault(block.source.name, tensor.new_empty(block.source.shape))
            source.flatten(0, -2)[list(block.rows)] = block.within(tensor)
        if piece.blocks:
            continue
        whole = stored.get(piece.source)
        if whole is None:
            whole = stored[piece.source] = tensor.new_empty(piece.source_shape)
        if piece.rows:
            whole[list(piece.rows)] = tensor.reshape(-1, *piece.source_shape[1:])
        else:
            part = taken(whole, piece)
            part.copy_(tensor.reshape(part.shape))
    return stored


def config_file(directory: Path) -> Path:
    """Return the path of config.json, or of mistral-inference's params.json if only that exists."""
    file, params = directory / "config.json", directory / "params.json"
    return params if params.is_file() and not file.exists() else file


def _stored_names(layout: Layout, weights: CheckpointWeights) -> dict[str, str]:
    """Return the layout's name → stored name, without leftovers."""
    stored: dict[str, str] = {}
    for name in weights.entries:
        if layout.ignored(name):
            continue
        spelled = layout.rename(name)
        # If a tensor is stored under two spellings, the second is reported as unused.
        stored[f"{spelled} again" if spelled in stored else spelled] = name
    return stored


def _check_headers(
    path: Path, layout: Layout, weights: CheckpointWeights, stored: dict[str, str]
) -> None:
    """Refuse the checkpoint with all faults of its tensors, not only the first."""
    expected = {n: shape for p in layout.pieces.values() for n, shape in p.shapes.items()}
    embedding = layout.pieces["embedding.weight"].source_shape
    all_expected = expected | {h: embedding for h in layout.tied_heads if h in stored}
    missing, misshaped, mistyped = [], [], []
    for name, shape in all_expected.items():
        if name not in stored:
            note = " (its index promises it)" if name in weights.missing else ""
            missing.append(f"{name} {list(shape)}{note}")
            continue
        entry = weights.entries[stored[name]]
        if entry.shape != shape:
            misshaped.append(f"{name}: expected {list(shape)}, found {list(entry.shape)}")
        if entry.dtype is None:
            mistyped.append(f"{name}: {entry.stored_dtype}")
    unused = [
        f"{real} {list(weights.entries[real].shape)}"
        for name, real in stored.items()
        if name not in all_expected
    ]
    groups = {
        "missing": missing,
        "unused": unused,
        "wrong shape": misshaped,
        "not fp32, fp16 or bf16": mistyped,
    }
    faults = [f"{title} ({len(g)}):\n  " + "\n  ".join(g) for title, g in groups.items() if g]
    if faults:
        raise CheckpointError(
            "the tensors do not fit the config\n" + "\n".join(faults) + "\n",
            file=path, remedy="do the config and the weights come from the same model?",
        )  # fmt: skip


def _count_not_finite(tensor: Tensor) -> int:
    # NaN and infinity show in the extremes, which are 7 times faster to compute than isfinite and
    # need no memory
    low, high = torch.aminmax(tensor)
    if torch.isfinite(low) and torch.isfinite(high):
        return 0
    flat = tensor.view(-1)
    return sum(block.numel() - int(torch.isfinite(block).sum()) for block in flat.split(SCAN))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether the tensors share memory, or are equal bit for bit (so NaN equals itself)."""
    if a.dtype != b.dtype:
        return False
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    bits = INTEGER_BITS[a.dtype]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def is_model_file(path: Path) -> bool:
    """Return whether a path is named like a SentencePiece model."""
    return _MODEL_FILE.fullmatch(path.name) is not None


def _tokenizer_files(path: Path) -> list[Path]:
    standard = [path / name for name in TOKENIZER_FILES]
    existing = [
        file
        for file in [*standard, *sorted(filter(is_model_file, path.glob("*.model*")))]
        if os.path.lexists(file) and not file.is_dir()
    ]
    for file in existing:
        check_file(file, MAX_TEMPLATE_BYTES if file.suffix == ".jinja" else MAX_TEXT_BYTES)
    return existing


def _generation(path: Path, config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    generation_file = path / "generation_config.json"
    sources = [Fields(path / "config.json", config)]
    if generation_file.is_file():
        sources.insert(0, Fields(generation_file, read_json(generation_file)))
    settings: dict[str, Any] = {}
    for fields in sources:
        values = {k: fields.values[k] for k in ("eos_token_id", "bos_token_id") if k in fields}
        for name, value in values.items():
            for token in value if name == "eos_token_id" and isinstance(value, list) else [value]:
                if not _is_token(token, vocab_size):
                    message = f"does not name tokens of a vocabulary of {vocab_size}"
                    fields.refuse(name, message)
        fields.check()
        if "eos_token_id" in values:
            eos = values["eos_token_id"]
            ids = eos if isinstance(eos, list) else [eos]
            settings.setdefault("eos_token_ids", list(dict.fromkeys(ids)))
        if "bos_token_id" in values:
            settings.setdefault("bos_token_id", values["bos_token_id"])
        # Published files use -1 or vocab_size for "none". Nothing here pads, so these are dropped.
        pad = fields.values.get("pad_token_id")
        if _is_token(pad, vocab_size):
            settings.setdefault("pad_token_id", pad)
    return settings


def _is_token(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
