"""Read a GGUF file's metadata as the fields of a config.json, and place its tensors."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from edge.errors import CheckpointError, Faults
from edge.export.checkpoint.checkpoint import MODEL_CARD, READ, Checkpoint
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.gguf.architectures import LONGROPE_FACTORS, PLAIN, ROPE_FACTORS
from edge.export.checkpoint.gguf.conversion import GgufArchitecture
from edge.export.checkpoint.gguf.deltanet import DELTANETS
from edge.export.checkpoint.gguf.hybrids import HYBRIDS, MAX_BLOCKS
from edge.export.checkpoint.gguf.olmo import OLMO2
from edge.export.checkpoint.gguf.tokenizer import GgufTokenizer
from edge.export.checkpoint.gguf.weights import GgufFile
from edge.export.checkpoint.layout import Layout
from edge.export.checkpoint.weights import CheckpointWeights

ARCHITECTURES = {
    architecture.name: architecture for architecture in (*PLAIN, OLMO2, *HYBRIDS, *DELTANETS)
}
_EXPORT_ORIGINAL = "export the original checkpoint instead"
_EXPERTS = ("expert_count", "expert_used_count")
# false means an unsupported model; other keys that are false count as absent
_CAUSAL = "attention.causal"
_ONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.")
_INTEGER_KEYS = {"nextn_predict_layers", "rope.dimension_count"}
# values of `expert_gating_func`, in files since 2025
_SCORES = {"softmax": 1, "sigmoid": 2}
# original context and wavelength band of RoPE scaling in the published Llama 3 models
_LLAMA3 = {
    "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


class GgufFields(Fields):
    """Fields of a config.json made from GGUF metadata; faults name the file's own keys."""

    def __init__(self, file: Path, values: dict[str, Any], keys: Mapping[str, str]) -> None:
        super().__init__(file, values)
        self._keys = keys

    def refuse(self, name: str, message: str, remedy: str = _EXPORT_ORIGINAL) -> None:
        super().refuse(self._keys.get(name, name), message, remedy)


class GgufModel:
    """A file of a known architecture.

    Attributes:
        file: the file.
        architecture: description of its conversion.
        fields: reconstructed config.json.
    """

    def __init__(self, file: GgufFile) -> None:
        """Read the fields of a file. Raises CheckpointError when its architecture is unknown, keys
        are missing, or unknown keys could change the model.
        """
        self.file = file
        self.architecture = _architecture(file)
        prefix = f"{self.architecture.name}."
        metadata = {
            k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)
        }
        _check_keys(file, self.architecture, metadata)
        self.fields = _fields(file, self.architecture, metadata)
        file.restore(lambda name: self.architecture.restoration(name, self.fields.values))

    def place(self, layout: Layout) -> Layout:
        """Return the layout with the names of this file's tensors."""
        names = self._names()
        stored = self.file.tensors.keys()
        layout.find({theirs for theirs, ours in names.items() if not stored.isdisjoint(ours)})
        layout.otherwise.clear()  # alternative forms do not apply to this file's names
        sources = {theirs: cycle(ours) for theirs, ours in names.items()}
        for name, piece in layout.pieces.items():
            if piece.source in names:
                # several tensors each have some of its rows, in order; a stack is one tensor
                if names[piece.source][1:] or piece.stack:
                    piece = replace(
                        piece, source_shape=piece.shape, start=0, block=0, period=0, stack=()
                    )
                layout.pieces[name] = replace(piece, source=next(sources[piece.source]))
        layout.tied_heads = tuple(names.get(head, [head])[0] for head in layout.tied_heads)
        drafting = tuple(f"blk.{block}." for block in self._drafting_blocks())
        ignored = (ROPE_FACTORS, *LONGROPE_FACTORS)
        layout.ignored = lambda name: name in ignored or name.startswith(drafting)
        layout.rename = lambda name: name
        return layout

    def _drafting_blocks(self) -> range:
        """Return the blocks after the last layer, which predict tokens beyond the next."""
        count, drafting = map(
            self.fields.values.get, ("num_hidden_layers", "mtp_num_hidden_layers")
        )
        if not (
            isinstance(count, int) and isinstance(drafting, int) and 0 <= drafting <= MAX_BLOCKS
        ):
            return range(0)
        return range(count, count + drafting)

    def _names(self) -> dict[str, list[str]]:
        """Return name in the checkpoint → names in the file, for every possible tensor."""
        architecture, count = self.architecture, self.fields.values.get("num_hidden_layers")
        names: dict[str, list[str]] = {theirs: [ours] for ours, theirs in architecture.ends.items()}
        for block in range(count if isinstance(count, int) and 0 < count <= MAX_BLOCKS else 0):
            for ours, theirs in architecture.block.items():
                name = f"{architecture.layer}.{block}.{theirs}"
                names.setdefault(name, []).append(f"blk.{block}.{ours}")
        # an MLP has a different name next to experts
        stored = self.file.tensors.keys()
        return {name: [o for o in ours if o in stored] or ours for name, ours in names.items()}


def _architecture(file: GgufFile) -> GgufArchitecture:
    metadata = file.metadata
    if metadata.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"is one of {metadata['split.count']!r:.20} parts", file=file.path,
            field="split.count", remedy="join them: llama-gguf-split --merge",
        )  # fmt: skip
    name = metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise CheckpointError(
            f"is {name!r:.60}; {', '.join(ARCHITECTURES)} are known",
            file=file.path, field="general.architecture", remedy=_EXPORT_ORIGINAL,
        )  # fmt: skip
    return architecture


def _check_keys(
    file: GgufFile, architecture: GgufArchitecture, metadata: Mapping[str, Any]
) -> None:
    faults = Faults()
    for key in architecture.required:
        if key not in metadata:
            faults.add(f"{architecture.name}.{key}", "is missing", "convert the model again")
    inert = {*architecture.inert, *(_EXPERTS if metadata.get("expert_count") in (0, 1) else ())}
    if metadata.get("expert_gating_func") == _SCORES[architecture.score]:
        inert.add("expert_gating_func")
    if unstacked := sorted(filter(_ONE_EXPERT.match, file.tensors)):
        message = "is one expert's, as conversions before April 2024 wrote them"
        faults.add(unstacked[0], message, "convert the model again, which stacks them")
    if not metadata.get(_CAUSAL, True):
        message = "is false: tokens see later ones, as in embedding models"
        faults.add(f"{architecture.name}.{_CAUSAL}", message, "export a model that generates text")
    for key in sorted(
        metadata.keys() - {*architecture.required, *architecture.optional, *inert, _CAUSAL}
    ):
        if metadata[key]:  # 0 and false switch it off
            faults.add(f"{architecture.name}.{key}", "is not a known key", _EXPORT_ORIGINAL)
    faults.refuse(CheckpointError, file=file.path)


def _fields(
    file: GgufFile, architecture: GgufArchitecture, metadata: Mapping[str, Any]
) -> GgufFields:
    key_fields = {**architecture.required, **architecture.optional}
    values: dict[str, Any] = dict(architecture.fixed)
    values |= {field: metadata[key] for key, field in key_fields.items() if key in metadata}
    shapes = {name: place.shape for name, place in file.tensors.items()}
    values["vocab_size"] = shapes.get("token_embd.weight", (None,))[0]
    values["tie_word_embeddings"] = "output.weight" not in shapes
    architecture.complete(shapes, metadata, values)
    fields = GgufFields(
        file.path, values, {f: f"{architecture.name}.{key}" for key, f in key_fields.items()}
    )
    _check_integers(fields, architecture, metadata)
    _check_heads(fields, architecture, metadata)
    if ROPE_FACTORS in shapes:
        _read_rope_factors(file, fields)
    if factors := LONGROPE_FACTORS.keys() & shapes.keys():
        _read_longrope(file, fields, sorted(factors), metadata.get("rope.scaling.attn_factor"))
    return fields


def _read_longrope(file: GgufFile, fields: GgufFields, names: list[str], factor: object) -> None:
    """Read LongRoPE's factors: one tensor for short texts and one for long texts."""
    scaling: dict[str, object] = {"rope_type": "longrope", "attention_factor": factor}
    for name in names:
        if file.entries[name].dtype is None:
            fields.refuse(name, "does not hold floating-point values")
        else:
            scaling[LONGROPE_FACTORS[name]] = file.read(name).flatten().tolist()
    fields.values["rope_scaling"] = scaling


def _check_integers(
    fields: GgufFields, architecture: GgufArchitecture, metadata: Mapping[str, Any]
) -> None:
    """Check whole numbers that only enter other fields, and so are checked nowhere else."""
    for key in sorted(
        _INTEGER_KEYS
        & metadata.keys()
        & {*architecture.optional, *architecture.inert} - {*architecture.sizes}
    ):
        if type(metadata[key]) is not int:
            fields.refuse(
                f"{architecture.name}.{key}", f"is {metadata[key]!r:.20}, not a whole number"
            )


def _check_heads(
    fields: GgufFields, architecture: GgufArchitecture, metadata: Mapping[str, Any]
) -> None:
    """Check that all heads have one size and are rotated whole."""
    width, heads = fields.values.get("hidden_size"), fields.values.get("num_attention_heads")
    if not (isinstance(width, int) and isinstance(heads, int) and heads > 0):
        return
    size = fields.values.get("head_dim", width // heads)
    for key in architecture.sizes:
        if metadata.get(key, size) != size:
            message = f"is {metadata[key]!r:.20}; only heads of {size} values are known"
            fields.refuse(f"{architecture.name}.{key}", message)


def _read_rope_factors(file: GgufFile, fields: GgufFields) -> None:
    """Read Llama 3's scaled RoPE, for which the file has a factor per pair of values.

    The factor is 1 for short waves, `factor` for long ones, and 1 / ((1 - s) / factor + s) between,
    with s = (original / wavelength - low) / (high - low): transformers, modeling_rope_utils.py.
    """
    size, width = fields.values.get("head_dim"), fields.values.get("hidden_size")
    if size is None and isinstance(width, int):
        size = width // fields.integer("num_attention_heads")
    header = file.entries[ROPE_FACTORS]
    if header.dtype is None or header.shape != (size and size // 2,):
        fields.refuse(ROPE_FACTORS, f"has the shape {list(header.shape)} for heads of {size}")
        return
    theta = max(1.0, fields.number("rope_theta", 10000.0))
    factors = file.read(ROPE_FACTORS).double().numpy()
    factor = float(factors.max())
    pairs = np.arange(len(factors), dtype=np.float64)
    wavelengths = 2 * np.pi * theta ** (pairs / len(factors))
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = (_LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not factor >= 1 or not np.allclose(factors, expected, rtol=1e-4):
        fields.refuse(ROPE_FACTORS, "does not scale RoPE as Llama 3 does")
    fields.values["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}


SUFFIX = ".gguf"


def find_gguf(path: Path) -> Path | None:
    """Return a path's GGUF file: itself, or the only one in a folder without a config.json.

    Returns None for other paths. Raises CheckpointError for a folder with several.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if (path / "config.json").exists():
        return None
    found = _files_in(path)
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:6])
        raise CheckpointError(
            f"holds several GGUF files: {names}", file=path, remedy="name one of them"
        )
    return found[0] if found else None


def _files_in(folder: Path) -> list[Path]:
    """Return a folder's GGUF files: a pipe of such a name would block."""
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if file.is_file())


class GgufCheckpoint(Checkpoint):
    """A GGUF file's weights under canonical names, with its tokenizer."""

    def __init__(self, model: GgufModel, family: str, layout: Layout) -> None:
        """Open the tensors. Raises CheckpointError when they do not fit the metadata."""
        file = model.file
        weights = CheckpointWeights()
        weights.add(file)
        super().__init__(file.path, family, model.fields.values, model.place(layout), weights)
        text = GgufTokenizer(file.path, file.metadata, self.config.vocab_size)
        self.generation = text.generation()
        self.no_tokenizer = text.refused
        folder = Path(tempfile.mkdtemp(prefix="edge-gguf-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.tokenizer_files = text.write(folder)
        self.stated_licence = _licence(file.metadata)

    @property
    def card(self) -> Path | None:
        readme = self.path.parent / MODEL_CARD
        # a README counts only if there is one GGUF file, and only with a card's front matter
        only_file = len(_files_in(self.path.parent)) == 1
        return readme if only_file and readme.is_file() and _is_card(readme) else None

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size

    def fingerprint(self) -> str:
        """Return the SHA-256, in hex, of the file."""
        content = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(READ):
                content.update(block)
        return content.hexdigest()


def _is_card(path: Path) -> bool:
    """Return whether a README is a model card: it begins with the fields that hubs read."""
    with path.open("rb") as file:
        return file.readline(8).strip() == b"---"


def _licence(metadata: dict[str, Any]) -> str | None:
    stated = metadata.get("general.license")
    return stated[:200] if isinstance(stated, str) and stated.strip() else None
