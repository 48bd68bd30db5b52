"""The JSON documents of a bundle: strict JSON, then a version, then a pydantic model."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from edge.bundle import strict_json
from edge.bundle.paths import REMEDY
from edge.errors import BundleError

Document = TypeVar("Document", bound=BaseModel)


def parse(raw: bytes, file: Path, kind: type[Document], known: int, absent: int | None) -> Document:
    """The document in `raw`. `known`: the schema version that is read; `absent`: what a document
    without one is taken for. Raises BundleError naming the file and the field.
    """
    try:
        data = strict_json.loads(raw)
    except ValueError as problem:
        raise BundleError(f"is not valid JSON: {problem}", file=file, remedy=REMEDY) from None
    version = data.get("schema_version", absent) if isinstance(data, dict) else None
    if version != known:
        raise BundleError(
            f"is {version!r}, this runtime reads version {known}",
            file=file,
            field="schema_version",
            remedy="export the model again with this version, or update mamba-edge",
        )
    try:
        return kind.model_validate(data)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or file.stem
        more = f" (and {problem.error_count() - 1} more)" if problem.error_count() > 1 else ""
        raise BundleError(first["msg"] + more, file=file, field=field, remedy=REMEDY) from None
