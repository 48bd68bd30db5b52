"""JSON schemas of a bundle's documents, with which the C library validates them.

    python -m edge.runtime.cpu.schemas     rewrites them

They are generated from the pydantic models that Python validates with, so both accept the same
documents. Checks between fields are implemented again in `runtime/libedge/src`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from edge.bundle.manifest import Manifest
from edge.launch import LaunchPlan
from edge.mixers.base import Grown

FOLDER = Path(__file__).resolve().parent.parent / "libedge" / "src"
_WIDTH = 100


def files() -> dict[str, str]:
    """Return file name → content of the files in `FOLDER`, each a C string literal."""
    return {
        "schema_manifest.inc": _schema_text(Manifest),
        "schema_plan.inc": _schema_text(LaunchPlan),
    }


def _schema_text(model: type[BaseModel]) -> str:
    schema = _plain(model.model_json_schema())
    definitions = schema["$defs"]
    for kind in _subclasses(Grown):
        if kind.__name__ in definitions:
            definitions[kind.__name__]["later"] = sorted(kind.all_later())
    data = json.dumps(schema, separators=(",", ":"))
    lines = [data[at : at + _WIDTH] for at in range(0, len(data), _WIDTH)]
    return "\n".join(f'R"json({line})json"' for line in lines) + "\n"


def _subclasses(kind: type[Grown]) -> Iterator[type[Grown]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _plain(value: Any) -> Any:
    """Remove titles and descriptions, and write infinity as a string, as JSON has none."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    out = {key: _plain(item) for key, item in value.items() if key not in ("title", "description")}
    if any("infinite" in item for item in out.get("prefixItems", ())):
        out["default"] = [end if end is not None else "inf" for end in out["default"]]
    return out


if __name__ == "__main__":
    for name, content in files().items():
        (FOLDER / name).write_text(content)
