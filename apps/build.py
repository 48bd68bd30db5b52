"""`edge build BUNDLE`: a TensorRT engine for this GPU, or one for RTX GPUs elsewhere."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge import child
from edge.apps import options, progress
from edge.apps.terminal import say
from edge.apps.units import megabytes
from edge.errors import EngineError, InputError

if TYPE_CHECKING:
    from edge.bundle import Bundle
    from edge.runtime.tensorrt.build import Built

# set for the child, which then builds
VARIABLE = "EDGE_BUILD_APART"
# a build ends at its next step, of which the longest tries out one kernel after another
_PATIENCE_S = 60.0


def build(
    bundle: options.BundleName,
    window: Annotated[
        int | None, typer.Option(help="Most tokens of a run that can be undone. [default: 8]")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Most sequences. [default: 1]")] = None,
    capacity: Annotated[
        int | None,
        typer.Option(help="Most tokens of the KV caches. [default: trained context, up to 4096]"),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Most tokens of one run. [default: the bundle's]")
    ] = None,
    workspace: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="MiB that a run's values may take.")
    ] = 256,
    force: Annotated[bool, typer.Option("--force", help="Build it even if there is one.")] = False,
    aliased: Annotated[
        bool,
        typer.Option("--aliased", help="Tell TensorRT what is written in place (a preview)."),
    ] = False,
    rtx: Annotated[
        bool, typer.Option("--rtx", help="With TensorRT for RTX: no plugins, no GPU needed.")
    ] = False,
    sm: Annotated[
        str | None, typer.Option(help="With --rtx: GPUs to build for ahead of time, as 86,89.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write the bare engine to a file.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Build the engine that `--engine tensorrt` runs, on the GPU it is for.

    It is kept in the user's cache (EDGE_CACHE names another folder), never in the bundle, and built
    again after an update of TensorRT, driver, plugin library or bundle. Ctrl-C leaves nothing.
    """
    from edge.bundle import open_bundle
    from edge.runtime.model import resolve
    from edge.runtime.tensorrt.compile import Order
    from edge.runtime.tensorrt.profiles import sizes

    if sm is not None and not rtx:
        raise InputError(
            "needs --rtx: without it TensorRT builds for the GPU of this machine", field="--sm"
        )
    if aliased and rtx:
        raise InputError("is for plugins, which --rtx does not use", field="--aliased")
    architectures, folder = _architectures(sm), resolve(bundle)
    if output is not None:
        _check_output(output, folder)
    if not _is_child():
        flags = {
            "--window": window, "--batch": batch, "--capacity": capacity, "--chunk": chunk,
            "--workspace": workspace, "--sm": sm, "--output": output,
        }  # fmt: skip
        switches = {"--force": force, "--aliased": aliased, "--rtx": rtx, "--json": as_json}
        raise typer.Exit(_run_apart(_words(bundle, flags, switches), str(folder)))
    with open_bundle(folder) as opened:
        manifest = opened.manifest
        asked = sizes(
            manifest.model,
            manifest.limits.chunk if chunk is None else chunk,
            window=window,
            batch=batch,
            capacity=capacity,
        )
        built = _build(opened, Order(asked, workspace, aliased, architectures, force), rtx)
    if output is not None:
        _write_bare(built.path, output)
    for note in built.notes:
        say(f"note: {note}", file=sys.stderr)
    if as_json:
        say(json.dumps(facts(built) | {"bare": None if output is None else str(output)}, indent=1))
    else:
        say(describe(built) + ("" if output is None else f"\n  bare        {output}"))


def _words(bundle: str, flags: Mapping[str, object], switches: Mapping[str, bool]) -> list[str]:
    """The command line that was given."""
    words = [f"{name}={value}" for name, value in flags.items() if value is not None]
    return [*words, *(name for name, on in switches.items() if on), "--", bundle]


def _build(bundle: Bundle, order: Any, rtx: bool) -> Built:
    """Build with what is on this machine; with a progress bar at a terminal."""
    from edge.runtime.cuda import install
    from edge.runtime.tensorrt import bindings, library, machine
    from edge.runtime.tensorrt.build import build

    trt = bindings.load("rtx" if rtx else "tensorrt")
    plugins = None if rtx else library.open_library()
    if rtx and not order.architectures and install.driver_version() is None:
        raise EngineError(
            "this machine has no GPU to build for", field="--sm", remedy="name some: --sm 86,89"
        )
    gpu = None if order.architectures else machine.open_gpu()
    if plugins is not None:
        library.register(trt, plugins)
    with progress.stages("building", 30) as show:
        return build(
            bundle, order, trt, plugins, gpu, lambda what, done, of: show(what, done / max(1, of))
        )


def _architectures(text: str | None) -> tuple[int, ...]:
    """`86,sm_89` is (86, 89). Raises InputError."""
    found = set()
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        digits = part.removeprefix("sm_")
        if not digits.isdecimal() or len(digits) > 3:
            raise InputError(
                f"unknown architecture {part!r:.40}", field="--sm", remedy="write it as 86,89"
            )
        found.add(int(digits))
    if text is not None and not found:
        raise InputError("names no architecture", field="--sm", remedy="write it as 86,89")
    return tuple(sorted(found))


def _check_output(output: Path, bundle: Path) -> None:
    """Raises InputError for a file inside of the bundle: an engine is never part of it."""
    if output.is_dir():
        raise InputError("is a folder", field="--output", remedy="name a file")
    if bundle.resolve() in output.resolve().parents:
        raise InputError(
            "lies inside the bundle, which lists every file it has",
            field="--output",
            remedy="name a file elsewhere",
        )
    if not os.access(output.absolute().parent, os.W_OK):
        raise InputError(f"{output.absolute().parent} cannot be written", field="--output")


def _write_bare(engine: Path, output: Path) -> None:
    from edge.runtime.replace import replace
    from edge.runtime.tensorrt import sealed

    with sealed.read(engine) as found:
        try:
            replace(output.absolute(), (found.body,), keep=False)
        except OSError as problem:
            raise EngineError(
                f"cannot be written: {problem.strerror or problem}", file=output
            ) from problem


def facts(built: Built) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "engine": str(built.path),
        "bytes": built.engine_bytes,
        "built": built.seconds > 0,
        "seconds": round(built.seconds, 1),
        "key": built.key,
        "components": dict(built.components),
        "sizes": built.sizes.model_dump(),
        "profiles": {
            each.name: {symbol: list(range_) for symbol, range_ in each.symbols.items()}
            for each in built.profiles
        },
        "notes": list(built.notes),
    }


def describe(built: Built) -> str:
    """What was built, in a few lines."""
    parts, sizes = built.components, built.sizes
    gpus = f"sm_{parts['sm'].replace(',', ', sm_')}" + (
        f" ({parts['gpu']})" if parts["gpu"] else ""
    )
    how = f"built in {built.seconds:.0f} s" if built.seconds else "existed already"
    title = "TensorRT for RTX" if parts["kind"] == "rtx" else "TensorRT"
    capacity = f", capacity {sizes.capacity}" if sizes.capacity else ""
    return "\n".join(
        [
            f"{built.path}",
            f"  engine      {megabytes(built.engine_bytes)}, {how}",
            f"  for         {title} {parts['tensorrt']}, {gpus}",
            f"  sizes       window {sizes.window}, batch {sizes.batch}{capacity}, "
            f"chunk {sizes.chunk}",
            f"  profiles    {', '.join(each.name for each in built.profiles)}",
        ]
    )


# -- in a process of its own ----------------------------------------------------------------------


def _is_child() -> bool:
    return VARIABLE in os.environ


def _run_apart(arguments: Sequence[str], bundle: str) -> int:
    """`edge build` with these arguments; its exit code.

    Raises EngineError: its process was ended, by a crash or for memory; whatever interrupts this
    one, after the child has ended.
    """
    command = child.command("edge.apps.cli", "build", *arguments)
    with tempfile.TemporaryDirectory(prefix="mamba-edge-build-") as scratch:
        # a session of its own: Ctrl-C comes to this process, and once
        process = subprocess.Popen(
            command,
            env=os.environ | {VARIABLE: "1", "TMPDIR": scratch},
            start_new_session=True,
        )
        atexit.register(process.kill)  # where this process ends before it has
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    why = "memory ran out" if code == -signal.SIGKILL else "the graph or TensorRT is at fault"
    raise EngineError(
        f"TensorRT's process ended with {name} during the build: {why}",
        file=bundle,
        remedy="edge info BUNDLE checks the bundle; for memory lower --workspace, --chunk or "
        "--batch, or stop other programs",
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """In order, so that nothing half-made is left; at once when interrupted again."""
    process.terminate()
    try:
        process.wait(_PATIENCE_S)
    except BaseException:
        process.kill()
        process.wait()
