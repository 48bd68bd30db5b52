"""Cache of built engines.

An engine is valid for one bundle, TensorRT, GPU, driver and plugin library. Bundle, GPU, sizes and
flags determine its file name, so a rebuild, for instance after an update, replaces the file. All
other dependencies are in the header and compared before use. `edge.runtime.tensorrt.sealed` defines
the file format.
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

# What an engine depends on besides `EngineSizes`, and the name of each in messages.
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
# components that determine the file name
_NAME_COMPONENTS = ("bundle", "kind", "sm", "gpu", "flags")
_ENGINE = "engine"
_TIMINGS = "timings"

Components = Mapping[str, str]


class EngineEntry(NamedTuple):
    """An engine file, described by its unverified header."""

    path: Path
    components: Components
    sizes: EngineSizes


def key(components: Components, sizes: EngineSizes) -> str:
    """Return the SHA-256 of everything that an engine depends on."""
    facts = {name: components.get(name, "") for name in COMPONENTS}
    text = json.dumps([facts, sizes.model_dump()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def name(components: Components, sizes: EngineSizes) -> str:
    """Return the file name of an engine; an engine that replaces it has the same name."""
    facts = [components.get(component, "") for component in _NAME_COMPONENTS]
    text = json.dumps([facts, sizes.model_dump()], sort_keys=True)
    return f"{_stem(components['bundle'])}{hashlib.sha256(text.encode()).hexdigest()[:24]}.engine"


def _stem(bundle: str) -> str:
    return f"{bundle[:16]}-"


def command(bundle: str | Path, sizes: EngineSizes | None = None, *flags: str) -> str:
    """Return the command that builds the engine of a bundle for these sizes."""
    words = ["edge", "build", str(bundle)]
    if sizes is not None:
        words += ["--window", str(sizes.window), "--batch", str(sizes.batch)]
        words += ["--capacity", str(sizes.capacity)] if sizes.capacity else []
        words += ["--chunk", str(sizes.chunk)]
    return shlex.join([*words, *flags])


def store(
    components: Components, sizes: EngineSizes, engine: bytes | memoryview, facts: Mapping[str, Any]
) -> Path:
    """Store an engine atomically; `facts` are information for readers of the header.

    Raises EngineError if the folder cannot be written or belongs to another user.
    """
    header = {
        "what": _ENGINE,
        "key": key(components, sizes),
        "components": dict(components),
        "sizes": sizes.model_dump(),
        "facts": dict(facts),
    }
    return sealed.write(name(components, sizes), header, engine)


def there(components: Components, sizes: EngineSizes) -> Path | None:
    """Return the file of exactly this engine, verified; None if it must be built."""
    path = sealed.folder() / name(components, sizes)
    try:
        with sealed.read(path) as opened:
            matches = opened.header.get("key") == key(components, sizes)
            return path if matches and opened.header.get("what") == _ENGINE else None
    except (FileNotFoundError, Damaged):
        return None


def find(bundle: str | Path, here: Components, otherwise: EngineSizes, *flags: str) -> Sealed:
    """Open and verify the engine of a bundle that was built last for this machine.

    The caller closes it. `here` holds the components known on this machine, `bundle` among them;
    others are not compared.

    Raises EngineError if there is no engine, if its components differ or if it was altered, with
    the build command: for the sizes of the matching engine, else for `otherwise`.
    """
    remedy = command(bundle, otherwise, *flags)
    candidates = entries(here["bundle"])
    if not candidates:
        raise EngineError(
            "no TensorRT engine of this bundle was built on this machine",
            file=bundle,
            remedy=f"build it: {remedy}",
        )
    last = newest([entry for entry in candidates if not _differences(entry.components, here)])
    if last is None:
        raise _mismatch_error(candidates, here, remedy)
    remedy = command(bundle, last.sizes, *flags)
    try:
        opened = sealed.read(last.path)
    except (Damaged, FileNotFoundError) as problem:
        message = problem.message if isinstance(problem, Damaged) else "was just removed"
        file = problem.file if isinstance(problem, Damaged) else last.path
        raise EngineError(message, file=file, remedy=f"build it again: {remedy}") from None
    # the file may have been replaced between peek and read
    if difference := _differences(opened.header["components"], here):
        opened.close()
        raise _mismatch_error([last], here, remedy, difference)
    return opened


def newest(among: Sequence[EngineEntry]) -> EngineEntry | None:
    """Return the entry that was written last."""

    def written(entry: EngineEntry) -> float:
        try:
            return entry.path.stat().st_mtime
        except OSError:
            return 0.0

    return max(among, key=written, default=None)


def entries(bundle: str | None = None) -> list[EngineEntry]:
    """Return the engine files of the bundle with this fingerprint, or of all bundles."""
    found = []
    pattern = "*.engine" if bundle is None else f"{_stem(bundle)}*.engine"
    for path in sorted(sealed.folder().glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            found.append(_entry(path))
    return found


def _entry(path: Path) -> EngineEntry:
    """Return an engine's entry. A damaged file has no components, so it matches no machine."""
    try:
        header = sealed.peek(path)
        components, sizes = (
            header["components"],
            EngineSizes.model_validate(header["sizes"], strict=True),
        )
        if header["what"] != _ENGINE or not isinstance(components, dict):
            raise KeyError("what")
    except (Damaged, KeyError, ValidationError):
        return EngineEntry(path, {}, EngineSizes())
    return EngineEntry(path, components, sizes)


def _differences(components: Components, machine: Components) -> list[str]:
    return [
        component
        for component in COMPONENTS
        if component in machine and components.get(component) != machine[component]
    ]


def _mismatch_error(
    entries: list[EngineEntry], machine: Components, remedy: str, known: list[str] | None = None
) -> EngineError:
    """Return the error that names the components in which the closest engine differs."""
    entry = min(entries, key=lambda candidate: len(_differences(candidate.components, machine)))
    if not entry.components:
        return EngineError(
            "is damaged, or was not written by this version",
            file=entry.path,
            remedy=f"build it again: {remedy}",
        )
    differences = known or _differences(entry.components, machine)
    changes = "; ".join(
        f"{COMPONENTS[component]} was {_abbreviate(entry.components.get(component))}, "
        f"is {_abbreviate(machine[component])}"
        for component in differences
    )
    return EngineError(
        f"the engine cannot be used here: {changes}",
        file=entry.path,
        field=differences[0],
        remedy=f"build it again: {remedy}",
    )


def _abbreviate(value: object) -> str:
    """Abbreviate hashes."""
    text = str(value) if value else "none"
    return f"{text[:12]}…" if len(text) == 64 else text


# -- timing cache ----------------------------------------------------------------------------------


def _timings_name(components: Components) -> str:
    facts = [
        components.get(component, "") for component in ("kind", "tensorrt", "sm", "gpu", "driver")
    ]
    return f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.timings"


def read_timings(components: Components) -> bytes:
    """Return TensorRT's timing cache of this machine; empty if there is none that is trusted."""
    try:
        with sealed.read(sealed.folder() / _timings_name(components)) as opened:
            return bytes(opened.body) if opened.header.get("what") == _TIMINGS else b""
    except (FileNotFoundError, EngineError):
        return b""


def write_timings(components: Components, data: bytes | memoryview) -> None:
    """Store the timing cache for the next build. Raises EngineError as `store` does."""
    sealed.write(_timings_name(components), {"what": _TIMINGS}, data)
