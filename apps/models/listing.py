"""`edge list`, `edge show` and `edge rm`: the models on this machine."""

from __future__ import annotations

import difflib
import json
import os
import secrets
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from edge.apps import options
from edge.apps.terminal import say
from edge.apps.units import megabytes
from edge.bundle import Manifest, open_bundle, store
from edge.errors import EdgeError, InputError
from edge.tensors import parameters

Names = Annotated[list[str] | None, typer.Argument(help="Names from edge list.")]


def list_models(as_json: options.AsJson = False) -> None:
    """List the pulled models: name, family, size, recipe, context, last used."""
    rows = [_row(name) for name in _names()]
    if as_json:
        say(json.dumps({"folder": str(store.folder()), "models": rows}, indent=1))
        return
    if rows:
        say(_table(rows))
    else:
        say("no models yet; edge pull fetches one, and demo is built in", file=sys.stderr)
    if unfinished := _unfinished():
        say(
            f"note: {megabytes(unfinished)} of unfinished downloads; edge pull resumes them, "
            "edge rm --unfinished removes them",
            file=sys.stderr,
        )


def show(
    name: Annotated[str, typer.Argument(help="A name from edge list, or demo.")],
    as_json: options.AsJson = False,
) -> None:
    """Show what a model is, where it came from, and under which licence."""
    from edge.runtime.model import EMBEDDED, resolve

    path = resolve(name) if name in EMBEDDED else _find(name)
    with open_bundle(path) as bundle:
        facts = _facts(name, path, bundle.manifest)
    if as_json:
        say(json.dumps(facts, indent=1))
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        if value is not None:
            say(f"{key.replace('_', ' '):<{width}}  {_for_people(key, value)}")


def _for_people(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "bytes":
        return megabytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def remove(
    names: Names = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Remove unfinished downloads.")
    ] = False,
) -> None:
    """Remove models."""
    if not names and not unfinished:
        raise typer.BadParameter("give a name, or --unfinished")
    paths = [_find(name) for name in names or []]
    for path in dict.fromkeys(paths):
        freed = _remove(path)
        store.forget_use(path.name)
        say(f"removed {path.name}: {megabytes(freed)}", file=sys.stderr)
    if unfinished:
        freed = _remove(store.folder() / store.DOWNLOADS)
        say(f"removed {megabytes(freed)} of downloads", file=sys.stderr)


def _names() -> list[str]:
    try:
        return store.names()
    except OSError as problem:
        raise InputError(
            f"cannot be read: {problem.strerror}", file=store.folder(),
            remedy="fix its permissions, or set EDGE_MODELS to another folder",
        ) from None  # fmt: skip


def _find(name: str) -> Path:
    path = store.find(name)
    if path is None:
        here = _names()
        near = [each for each in here if name in each] or difflib.get_close_matches(name, here, 3)
        remedy = f"do you mean {' or '.join(near[:3])}?" if near else "edge list shows the names"
        raise InputError("is not among the pulled models", file=name, remedy=remedy)
    return path


def _row(name: str) -> dict[str, Any]:
    """Return one model's row; a damaged model gets a row too, so that the list still works."""
    path = store.folder() / name
    try:
        with open_bundle(path) as bundle:
            manifest = bundle.manifest
    except EdgeError as problem:
        return {"name": name, "damaged": problem.message}
    return {
        "name": name,
        "family": manifest.model.family,
        "bytes": manifest.nbytes,
        "recipe": manifest.quantization.recipe,
        "context": manifest.model.max_context,
        "last_used": store.last_used(name),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [("NAME", "FAMILY", "SIZE", "RECIPE", "CONTEXT", "LAST USED")]
    for row in rows:
        if "damaged" in row:
            lines.append((row["name"], "damaged", "", "", "", "edge rm, then pull it again"))
            continue
        context = "any" if row["context"] is None else str(row["context"])
        size, used = megabytes(row["bytes"]), _ago(row["last_used"])
        lines.append((row["name"], row["family"], size, row["recipe"], context, used))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _ago(when: float | None) -> str:
    if when is None:
        return "never"
    seconds = max(0.0, time.time() - when)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _facts(name: str, path: Path, manifest: Manifest) -> dict[str, Any]:
    origin, tokenizer = manifest.provenance, manifest.tokenizer
    card = manifest.entry("README.md")
    return {
        "name": name,
        "path": str(path),
        "source": origin.source,
        "revision": origin.revision,
        "licence": origin.licence,
        "family": origin.family,
        "layers": ", ".join(f"{count} {kind}" for kind, count in manifest.model.kinds.items()),
        "parameters": parameters(manifest.model),
        "recipe": manifest.quantization.recipe,
        "bytes": manifest.nbytes,
        "context": manifest.model.max_context,
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size} tokens",
        "chat_template": manifest.chat_template is not None,
        "card": None if card is None else str(path / card.path),
        "made_by": manifest.created_by,
        "last_used": _ago(store.last_used(name)),
    }


def _remove(path: Path) -> int:
    """Remove a folder and return its size; it leaves every list at once, before it is deleted."""
    if not path.exists():
        return 0
    size = _size(path)
    if path.is_symlink():
        path.unlink()
        return size
    aside = path.with_name(f".{path.name.lstrip('.')}.removing-{secrets.token_hex(4)}")
    try:
        path.rename(aside)
        shutil.rmtree(aside)
    except OSError as problem:
        raise InputError(f"cannot be removed: {problem.strerror}", file=path) from None
    return size


def _unfinished() -> int:
    return _size(store.folder() / store.DOWNLOADS)


def _size(folder: Path) -> int:
    """Return the bytes in a folder; files that another process removes meanwhile are skipped."""
    size = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):
                size += os.lstat(os.path.join(place, name)).st_size
    return size
