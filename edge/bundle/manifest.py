"""The contents of `manifest.json`. Unknown keys are refused: an older runtime must not guess."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from edge.bundle.files import check_relative
from edge.config import ModelConfig
from edge.errors import some
from edge.launch import ARCHITECTURES, WHOLE, Log

SCHEMA_VERSION = 1
MAX_MANIFEST = 2 << 20  # bytes

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
TokenId = Annotated[int, Field(ge=0, le=1 << 31)]
Name = Annotated[str, Field(min_length=1, max_length=64)]


class _ManifestModel(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), defer_build=True
    )


class FileEntry(_ManifestModel):
    """One file of the bundle; `path` is relative to the folder."""

    path: str
    size: Annotated[int, Field(ge=0, le=1 << 42)]
    sha256: Sha256

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        check_relative(path)
        return path


class Quantization(_ManifestModel):
    """How weights, and with some recipes activations, are stored."""

    recipe: Name
    bits: Annotated[Literal[4, 8, 16, 32], WHOLE]
    block_size: Annotated[int, Field(gt=0, le=4096)] | None = None
    details: dict[str, JsonValue] = {}


class Limits(_ManifestModel):
    """Limits of a run. `chunk`: maximum number of tokens."""

    chunk: Annotated[int, Field(gt=0, le=65536)]


class TokenizerInfo(_ManifestModel):
    """The tokenizer's kind and file, and the ids that begin, end and pad a text."""

    kind: Literal["tokenizer.json", "sentencepiece", "bytes"]
    file: str | None = None
    sha256: Sha256 | None = None
    vocab_size: Annotated[int, Field(gt=0, le=1 << 31)]
    bos: TokenId | None = None
    eos: tuple[TokenId, ...] = ()
    pad: TokenId | None = None
    add_bos: bool = False

    @model_validator(mode="after")
    def _complete(self) -> TokenizerInfo:
        if (self.kind == "bytes") != (self.file is None):
            raise ValueError("a byte tokenizer has no file, all others have one")
        if (self.file is None) != (self.sha256 is None):
            raise ValueError("file and sha256 go together")
        return self


class GenerationDefaults(_ManifestModel):
    """Sampling defaults a model ships with; None means the runtime's own default."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    stop: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = ()


class Provenance(_ManifestModel):
    """Where the weights came from.

    Attributes:
        fingerprint: fingerprint of the checkpoint's config and weights.
        bundle: fingerprint of the floating-point bundle that was quantized instead of a checkpoint.
        revision: commit or version of `source` that was pulled.
    """

    source: str
    family: Name
    fingerprint: Sha256
    licence: str | None = None
    bundle: Sha256 | None = None
    revision: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class Manifest(_ManifestModel):
    """The whole of `manifest.json`."""

    schema_version: Literal[1] = 1
    created_by: str
    model: ModelConfig
    quantization: Quantization
    # state tensors that are not fp32, by graph input name
    state_dtypes: dict[str, Literal["int8", "float16"]] = {}
    # inputs of the `ort` graph that feed logged rows back to Mamba-2's scans
    scan_logs: dict[str, Log] = {}
    opset: dict[str, int]
    # `ort` is for ONNX Runtime, `cuda` is the launch plan, `tensorrt` is the graph of plugins
    graphs: dict[Name, str]
    # index files of the compiled kernels by architecture: {"sm_87": "kernels/sm_87/…"}
    kernels: dict[Name, str] = {}
    limits: Limits
    tokenizer: TokenizerInfo
    chat_template: str | None = None
    generation: GenerationDefaults = GenerationDefaults()
    accuracy: dict[str, JsonValue] = {}
    provenance: Provenance
    files: tuple[FileEntry, ...] = Field(min_length=1, max_length=10_000)

    @field_validator("kernels")
    @classmethod
    def _known_architectures(cls, kernels: dict[str, str]) -> dict[str, str]:
        known = [f"sm_{sm}" for sm in ARCHITECTURES]
        faults = []
        if unknown := sorted(kernels.keys() - set(known)):
            faults.append(f"unknown {', '.join(unknown)}; this runtime knows {', '.join(known)}")
        faults += [
            f"the index of {name} is at {path!r:.80}"
            for name, path in kernels.items()
            if name in known and path != f"kernels/{name}/kernels.json"
        ]
        if faults:
            raise ValueError("; ".join(faults))
        return kernels

    @model_validator(mode="after")
    def _names_listed_files(self) -> Manifest:
        paths = [entry.path for entry in self.files]
        listed, faults = set(paths), []
        if len(listed) != len(paths):
            duplicates = sorted(path for path, count in Counter(paths).items() if count > 1)
            faults.append(f"files listed twice: {some(duplicates)}")
        named = {f"graphs.{name}": path for name, path in self.graphs.items()}
        named |= {f"kernels.{name}": path for name, path in self.kernels.items()}
        optional = {"tokenizer.file": self.tokenizer.file, "chat_template": self.chat_template}
        named |= {field: path for field, path in optional.items() if path is not None}
        if absent := [f"{field} {path!r}" for field, path in named.items() if path not in listed]:
            faults.append(f"named but not in files: {some(absent)}")
        if self.kernels and "cuda" not in self.graphs:
            faults.append("there are kernels, but graphs.cuda names no launch plan")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def nbytes(self) -> int:
        """Total bytes of all files."""
        return sum(entry.size for entry in self.files)

    def entry(self, path: str) -> FileEntry | None:
        """Return the entry of a listed file, or None. Searches; a bundle's files have a table."""
        return next((entry for entry in self.files if entry.path == path), None)

    def to_json(self) -> bytes:
        """Return the canonical bytes, with sorted keys: equal manifests have equal fingerprints."""
        data: dict[str, Any] = self.model_dump(mode="json")
        for key in ("kernels", "scan_logs"):
            if not data[key]:  # older runtimes refuse the key
                del data[key]
        if data["provenance"]["revision"] is None:
            del data["provenance"]["revision"]
        return (
            json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
        ).encode()
