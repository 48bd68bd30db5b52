"""`python -m edge.apps.demo.delta BUNDLE GGUF --requirement …`: store a bundle as a delta.

`BUNDLE` was exported in `w4` from a hybrid whose teacher is GGUF, a file of Q4_1 and Q8_0 tensors.
The delta leaves out the weights that the file already holds: see `edge.apps.models.delta`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer

from edge.apps.models.delta import DELTAS, OWN, WEIGHTS, WeightRange
from edge.bundle import open_bundle
from edge.bundle.files import sha256
from edge.bundle.manifest import FileEntry

_KINDS_OF = {
    "F32": ("f32",),
    "Q4_1": ("q4_1.codes", "q4_1.scales", "q4_1.minimums"),
    "Q8_0": ("q8_0.codes32", "q8_0.scales32"),
}
_FIRST = 64  # leading bytes that identify a tensor
_ALIGNED = 64  # tensors of weights.bin begin at multiples of this


def parts_of(base: Path) -> Iterator[tuple[WeightRange, bytes]]:
    """Yield every part that a delta can take from a GGUF file, with its bytes."""
    file = gguf.GGUFReader(base)
    heads = {
        f"attn_{letter}.weight": int(file.fields[f"llama.attention.{key}"].contents())
        for letter, key in (("q", "head_count"), ("k", "head_count_kv"))
    }
    for tensor in file.tensors:
        kinds = _KINDS_OF[tensor.tensor_type.name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        reordered = heads.get(tensor.name.split(".", 2)[-1], 0)
        for kind in kinds:
            part = WeightRange(kind, int(tensor.data_offset), shape, reordered)
            yield part, part.read(file.data)


def explain(weights: bytes, known: list[tuple[WeightRange, bytes]]) -> Iterator[WeightRange]:
    """Yield the parts that make up `weights`; bytes of no known tensor become "own" parts."""
    by_first: dict[bytes, list[tuple[WeightRange, bytes]]] = {}
    for part, data in known:
        by_first.setdefault(data[:_FIRST], []).append((part, data))
    own = at = 0
    while at < len(weights):
        found = next(
            (
                (part, data)
                for part, data in by_first.get(weights[at : at + _FIRST], [])
                if weights.startswith(data, at)
            ),
            None,
        )
        if found is None:
            own, at = own + _ALIGNED, at + _ALIGNED
            continue
        if own:
            yield WeightRange("own", 0, (own,))
        yield found[0]
        own, at = 0, at + len(found[1])
    if own:
        yield WeightRange("own", 0, (len(weights) - at + own,))


def write(
    bundle: Path, base: Path, requirement: str, folder: Path, card: Path | None = None
) -> None:
    """Write the delta to `folder`, which must not exist; `card` replaces the bundle's README.md."""
    weights = (bundle / WEIGHTS).read_bytes()
    parts = list(explain(weights, list(parts_of(base))))
    folder.mkdir(parents=True)
    with open_bundle(bundle) as opened:
        manifest = opened.manifest
    sources = {e.path: bundle / e.path for e in manifest.files if e.path != WEIGHTS}
    if card is not None:
        sources["README.md"] = card
    files = {entry.path: entry for entry in manifest.files}
    for path, source in sources.items():
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, folder / path)
        size, digest = _measure(source)
        files[path] = FileEntry(path=path, size=size, sha256=digest)
    origin = {"source": folder.name, "revision": requirement}
    changed = {
        "provenance": manifest.provenance.model_copy(update=origin),
        "files": tuple(files[path] for path in sorted(files)),
    }
    (folder / "manifest.json").write_bytes(manifest.model_copy(update=changed).to_json())
    _write_own(parts, weights, base, folder / OWN)
    size, digest = _measure(base)
    fields = {
        "requirement": requirement, "file": base.name, "size": size, "sha256": digest,
        "parts": [[p.kind, p.at, list(p.shape), p.heads] for p in parts],
    }  # fmt: skip
    (folder / "delta.json").write_text(json.dumps(fields) + "\n")


def _write_own(parts: Sequence[WeightRange], weights: bytes, base: Path, target: Path) -> None:
    """Write the bytes of `weights` that are of no tensor of the base file."""
    file = np.memmap(base, np.uint8, "r")
    at = 0
    with target.open("wb") as out:
        for part in parts:
            size = part.shape[0] if part.kind == "own" else len(part.read(file))
            if part.kind == "own":
                out.write(weights[at : at + size])
            at += size


def _measure(path: Path) -> tuple[int, str]:
    """Return a file's size and SHA-256."""
    size = path.stat().st_size
    with path.open("rb") as file:
        return size, sha256(file.fileno(), size)


def main(
    bundle: Annotated[Path, typer.Argument(help="The hybrid, exported in w4.")],
    base: Annotated[Path, typer.Argument(help="The GGUF file of its teacher.")],
    requirement: Annotated[str, typer.Option(help="The package that holds it, name==version.")],
    name: Annotated[str, typer.Option(help="Name of the model.")],
    card: Annotated[Path | None, typer.Option(help="A model card, for README.md.")] = None,
) -> None:
    """Write a bundle as a delta into the package."""
    folder = DELTAS / name
    shutil.rmtree(folder, ignore_errors=True)
    write(bundle, base, requirement, folder, card)
    sizes = {file.name: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    print(f"{folder}: {sum(sizes.values()) / 1e6:.1f} MB, {sizes[OWN] / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    typer.run(main)
