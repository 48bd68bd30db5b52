"""`edge build BUNDLE`: build a TensorRT engine for this GPU, or for RTX GPUs elsewhere."""

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

# set in the child process, which runs the build
VARIABLE = "EDGE_BUILD_APART"
# a build stops only between steps; the longest step times one kernel after another
_PATIENCE_S = 60.0


def build(
    bundle: options.BundleName,
    window: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens that can be rewound. [default: 8]"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Maximum number of sequences. [default: 1]")
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(help="Tokens the KV caches hold. [default: trained context, up to 4096]"),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Maximum tokens of a chunk. [default: the bundle's]")
    ] = None,
    workspace: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="MiB for the intermediate values of a run.")
    ] = 256,
    force: Annotated[
        bool, typer.Option("--force", help="Rebuild even if an engine exists.")
    ] = False,
    aliased: Annotated[
        bool,
        typer.Option("--aliased", help="Declare in-place outputs to TensorRT (preview feature)."),
    ] = False,
    rtx: Annotated[
        bool, typer.Option("--rtx", help="Use TensorRT for RTX: no plugins; with --sm, no GPU.")
    ] = False,
    sm: Annotated[
        str | None,
        typer.Option(help="With --rtx: GPUs to build for ahead of time, such as 86,89."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write the bare engine to a file.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Build the engine that `--engine tensorrt` runs, on the GPU that will run it.

    The engine is kept in the user's cache (EDGE_CACHE names another folder), never in the bundle.
    Build it again after an update of TensorRT, the driver, the plugin library or the bundle.
    Ctrl-C leaves no partial files.
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
        raise typer.Exit(_run_in_child(_child_arguments(bundle, flags, switches), str(folder)))
    with open_bundle(folder) as opened:
        manifest = opened.manifest
        with options.named_as_options("--capacity"):
            engine_sizes = sizes(
                manifest.model,
                manifest.limits.chunk if chunk is None else chunk,
                window=window,
                batch=batch,
                capacity=capacity,
            )
        built = _build(opened, Order(engine_sizes, workspace, aliased, architectures, force), rtx)
    if output is not None:
        _write_bare(built.path, output)
    for note in built.notes:
        say(f"note: {note}", file=sys.stderr)
    if as_json:
        say(json.dumps(facts(built) | {"bare": None if output is None else str(output)}, indent=1))
    else:
        say(describe(built) + ("" if output is None else f"\n  bare        {output}"))


def _child_arguments(
    bundle: str, flags: Mapping[str, object], switches: Mapping[str, bool]
) -> list[str]:
    """Return the arguments that repeat this command line."""
    words = [f"{name}={value}" for name, value in flags.items() if value is not None]
    return [*words, *(name for name, on in switches.items() if on), "--", bundle]


def _build(bundle: Bundle, order: Any, rtx: bool) -> Built:
    """Build with the libraries on this machine, with a progress bar at a terminal."""
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
    """Parse `86,sm_89` into (86, 89). Raises InputError."""
    architectures = set()
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        digits = part.removeprefix("sm_")
        if not digits.isdecimal() or len(digits) > 3:
            raise InputError(
                f"unknown architecture {part!r:.40}", field="--sm", remedy="write it as 86,89"
            )
        architectures.add(int(digits))
    if text is not None and not architectures:
        raise InputError("names no architecture", field="--sm", remedy="write it as 86,89")
    return tuple(sorted(architectures))


def _check_output(output: Path, bundle: Path) -> None:
    """Raise InputError for a folder, an unwritable place, or a file inside the bundle."""
    if output.is_dir():
        raise InputError("is a folder", field="--output", remedy="name a file")
    if bundle.resolve() in output.resolve().parents:
        raise InputError(
            "lies inside the bundle, whose manifest lists every file",
            field="--output",
            remedy="name a file elsewhere",
        )
    if not os.access(output.absolute().parent, os.W_OK):
        raise InputError(f"{output.absolute().parent} cannot be written", field="--output")


def _write_bare(engine: Path, output: Path) -> None:
    from edge.replace import replace
    from edge.runtime.tensorrt import sealed

    with sealed.read(engine) as contents:
        try:
            replace(output.absolute(), (contents.body,))
        except OSError as problem:
            raise EngineError(
                f"cannot be written: {problem.strerror or problem}", file=output
            ) from problem


def facts(built: Built) -> dict[str, Any]:
    """Return the facts that `--json` prints."""
    return {
        "engine": str(built.path),
        "bytes": built.engine_bytes,
        "built": built.seconds > 0,
        "seconds": round(built.seconds, 1),
        "key": built.key,
        "components": dict(built.components),
        "sizes": built.sizes.model_dump(),
        "profiles": {
            profile.name: {symbol: list(range_) for symbol, range_ in profile.symbols.items()}
            for profile in built.profiles
        },
        "notes": list(built.notes),
    }


def describe(built: Built) -> str:
    """Describe the built engine in a few lines."""
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
            f"  profiles    {', '.join(profile.name for profile in built.profiles)}",
        ]
    )


def _is_child() -> bool:
    return VARIABLE in os.environ


def _run_in_child(arguments: Sequence[str], bundle: str) -> int:
    """Run `edge build` with these arguments in a child process; return its exit code.

    Raises EngineError when the child was killed, by a crash or for lack of memory. Re-raises
    whatever interrupts this process, after the child has ended.
    """
    command = child.command("edge.apps.cli", "build", *arguments)
    with tempfile.TemporaryDirectory(prefix="mamba-edge-build-") as scratch:
        # in a session of its own, so that Ctrl-C reaches this process only
        process = subprocess.Popen(
            command,
            env=os.environ | {VARIABLE: "1", "TMPDIR": scratch},
            start_new_session=True,
        )
        atexit.register(process.kill)  # in case this process ends first
        try:
            code = process.wait()
        except BaseException:
            _stop_child(process)
            raise
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    why = "memory ran out" if code == -signal.SIGKILL else "the graph or TensorRT is at fault"
    raise EngineError(
        f"TensorRT's process ended with {name} during the build: {why}",
        file=bundle,
        remedy="edge info BUNDLE checks the bundle; to save memory, lower --workspace, --chunk or "
        "--batch, or stop other programs",
    )


def _stop_child(process: subprocess.Popen[bytes]) -> None:
    """Stop the child cleanly, so that no partial files are left; kill it if interrupted again."""
    process.terminate()
    try:
        process.wait(_PATIENCE_S)
    except BaseException:
        process.kill()
        process.wait()
