"""Engines kept between runs: named by what they are for, refused where anything else differs.

An engine belongs to one bundle, TensorRT, GPU, driver and plugin library. Its file is named by
bundle, GPU, sizes and flags, so that building again, after an update say, replaces it; all else is
in its header and compared before it is used (`edge.runtime.tensorrt.sealed` has the bytes).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from edge.errors import EngineError
from edge.runtime.tensorrt import sealed
from edge.runtime.tensorrt.profiles import EngineSizes
from edge.runtime.tensorrt.sealed import Damaged, Sealed

# What an engine depends on, and what each is called in a message. `EngineSizes` come on top.
COMPONENTS: Mapping[str, str] = {
    "bundle": "the bundle's fingerprint",
    "graph": "the graph",
    "weights": "the weights",
    "kind": "the library (TensorRT or TensorRT for RTX)",
    "tensorrt": "TensorRT's version",
    "plugins": "the plugin library",
    "kernels": "the compiled kernels",
    "sm": "the GPU's architecture",
    "gpu": "the GPU",
    "driver": "the driver",
    "flags": "the flags of the build",
    "edge": "mamba-edge's version",
}
# what the name says
_NAMED = ("bundle", "kind", "sm", "gpu", "flags")
_WHAT = "engine"
_TIMINGS = "timings"

Components = Mapping[str, str]


class EngineEntry(NamedTuple):
    """An engine file by its header, of which nothing is checked yet."""

    path: Path
    components: Components
    sizes: EngineSizes


def key(components: Components, sizes: EngineSizes) -> str:
    """SHA-256 over everything that can change an engine."""
    facts = {name: components.get(name, "") for name in COMPONENTS}
    text = json.dumps([facts, sizes.model_dump()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def name(components: Components, sizes: EngineSizes) -> str:
    """The file for an engine: the same for what takes its place."""
    facts = [components.get(each, "") for each in _NAMED]
    text = json.dumps([facts, sizes.model_dump()], sort_keys=True)
    return f"{_stem(components['bundle'])}{hashlib.sha256(text.encode()).hexdigest()[:24]}.engine"


def _stem(bundle: str) -> str:
    return f"{bundle[:16]}-"


def command(bundle: str | Path, sizes: EngineSizes | None = None, *flags: str) -> str:
    """What builds the engine of a bundle for these sizes."""
    words = ["edge", "build", str(bundle)]
    if sizes is not None:
        words += ["--window", str(sizes.window), "--batch", str(sizes.batch)]
        words += ["--capacity", str(sizes.capacity)] if sizes.capacity else []
        words += ["--chunk", str(sizes.chunk)]
    return shlex.join([*words, *flags])


def store(
    components: Components, sizes: EngineSizes, engine: bytes | memoryview, facts: Mapping[str, Any]
) -> Path:
    """Keep an engine, whole or not at all; `facts` are for whoever reads the header.

    Raises EngineError: the folder cannot be written, or is another's.
    """
    header = {
        "what": _WHAT,
        "key": key(components, sizes),
        "components": dict(components),
        "sizes": sizes.model_dump(),
        "facts": dict(facts),
    }
    return sealed.write(name(components, sizes), header, engine)


def there(components: Components, sizes: EngineSizes) -> Path | None:
    """The file of exactly this engine, whole and of this user; None where it has to be built."""
    path = sealed.folder() / name(components, sizes)
    try:
        with sealed.read(path) as found:
            right = found.header.get("key") == key(components, sizes)
            return path if right and found.header.get("what") == _WHAT else None
    except (FileNotFoundError, Damaged):
        return None


def find(bundle: str | Path, here: Components, otherwise: EngineSizes, *flags: str) -> Sealed:
    """The engine of a bundle that was built last for this machine, checked. The caller closes it.

    `here` are the components known here, `bundle` among them; others are not compared.

    Raises EngineError with the command that builds one, of the sizes `otherwise` where there is
    none: there is none, it was made with or for something else, it is altered.
    """
    remedy = command(bundle, otherwise, *flags)
    found = entries(here["bundle"])
    if not found:
        raise EngineError(
            "no TensorRT engine of this bundle was built on this machine",
            file=bundle,
            remedy=f"build it: {remedy}",
        )
    last = newest([entry for entry in found if not _differences(entry.components, here)])
    if last is None:
        raise _foreign(found, here, remedy)
    remedy = command(bundle, last.sizes, *flags)
    try:
        opened = sealed.read(last.path)
    except (Damaged, FileNotFoundError) as problem:
        message = problem.message if isinstance(problem, Damaged) else "was just removed"
        file = problem.file if isinstance(problem, Damaged) else last.path
        raise EngineError(message, file=file, remedy=f"build it again: {remedy}") from None
    # between the look and the reading it may have been replaced
    if difference := _differences(opened.header["components"], here):
        opened.close()
        raise _foreign([last], here, remedy, difference)
    return opened


def newest(among: Sequence[EngineEntry]) -> EngineEntry | None:
    """The one that was written last."""

    def written(entry: EngineEntry) -> float:
        try:
            return entry.path.stat().st_mtime
        except OSError:
            return 0.0

    return max(among, key=written, default=None)


def entries(bundle: str | None = None) -> list[EngineEntry]:
    """Every engine file that can be read, of one bundle's fingerprint or all."""
    found = []
    pattern = "*.engine" if bundle is None else f"{_stem(bundle)}*.engine"
    for path in sorted(sealed.folder().glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            found.append(_entry(path))
    return found


def _entry(path: Path) -> EngineEntry:
    """An engine's header. A damaged one has no components, and so is nobody's."""
    try:
        header = sealed.peek(path)
        components, sizes = (
            header["components"],
            EngineSizes.model_validate(header["sizes"], strict=True),
        )
        if header["what"] != _WHAT or not isinstance(components, dict):
            raise KeyError("what")
    except (Damaged, KeyError, ValidationError):
        return EngineEntry(path, {}, EngineSizes())
    return EngineEntry(path, components, sizes)


def _differences(components: Components, here: Components) -> list[str]:
    return [each for each in COMPONENTS if each in here and components.get(each) != here[each]]


def _foreign(
    entries: list[EngineEntry], here: Components, remedy: str, found: list[str] | None = None
) -> EngineError:
    """Which component keeps the nearest engine from being used."""
    entry = min(entries, key=lambda each: len(_differences(each.components, here)))
    if not entry.components:
        return EngineError(
            "is damaged, or was not written by this version",
            file=entry.path,
            remedy=f"build it again: {remedy}",
        )
    differ = found or _differences(entry.components, here)
    said = "; ".join(
        f"{COMPONENTS[each]} was {_short(entry.components.get(each))}, is {_short(here[each])}"
        for each in differ
    )
    return EngineError(
        f"the engine cannot be used here: {said}",
        file=entry.path,
        field=differ[0],
        remedy=f"build it again: {remedy}",
    )


def _short(value: object) -> str:
    """Hashes by their beginning."""
    text = str(value) if value else "none"
    return f"{text[:12]}…" if len(text) == 64 else text


# -- what the builder measured ---------------------------------------------------------------------


def _timings(components: Components) -> str:
    facts = [components.get(each, "") for each in ("kind", "tensorrt", "sm", "gpu", "driver")]
    return f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.timings"


def read_timings(components: Components) -> bytes:
    """TensorRT's timing cache of this machine; empty where there is none that can be trusted."""
    try:
        with sealed.read(sealed.folder() / _timings(components)) as found:
            return bytes(found.body) if found.header.get("what") == _TIMINGS else b""
    except (FileNotFoundError, EngineError):
        return b""


def write_timings(components: Components, data: bytes | memoryview) -> None:
    """Keep it for the next build. Raises EngineError as `store` does."""
    sealed.write(_timings(components), {"what": _TIMINGS}, data)
