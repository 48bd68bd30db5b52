"""Options shared by several programs: the bundle, the engine and drafting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from edge.cpu import MOST_THREADS
from edge.errors import EdgeError, EngineError, Faults, InputError
from edge.runtime import ort_providers
from edge.runtime.engines import CHOICES, ENGINES, check_provider

if TYPE_CHECKING:
    from edge.runtime.model import Model

Number = TypeVar("Number", int, float)
_RUNNING = "Running the model"  # the panel of these options in help texts


def running(*names: str, **more: Any) -> Any:
    """Return an option about running the model."""
    return typer.Option(*names, rich_help_panel=_RUNNING, **more)


def known_engine(name: str | None) -> str | None:
    """Return the engine's name; an unknown name is a usage error."""
    if name is not None and name not in ENGINES:
        raise typer.BadParameter(f"unknown engine {name!r} (choose {CHOICES})")
    return name


BUNDLE_HELP = "Pulled model, bundle folder, or demo, demo-fp16, demo-draft, demo-bytes."
BundleName = Annotated[str, typer.Argument(help=BUNDLE_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Engine = Annotated[str, running(help=f"{CHOICES}.", callback=known_engine)]
Provider = Annotated[str | None, running(help=ort_providers.HELP)]
THREADS_HELP = "CPU threads. [default: one per core; one for small models]"
Threads = Annotated[int | None, running(min=1, max=MOST_THREADS, metavar="N", help=THREADS_HELP)]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A group of options: how models are run."""

    engine: Engine = "auto"
    provider: Provider = None
    threads: Threads = None
    spin: Annotated[
        bool,
        running("--spin", help="Keep idle threads spinning, on a machine that runs nothing else."),
    ] = False
    pin: Annotated[
        bool, running("--pin", help="Keep each thread of the engine cpu on a CPU of its own.")
    ] = False

    def load(self, bundle: str | Path) -> Model:
        """Load a bundle, with a progress bar if that takes a while."""
        from edge.apps.progress import load

        return load(bundle, **vars(self))

    def load_drafter(self, draft: str | None) -> Model | Literal["ngram"] | None:
        """Return the drafter: a loaded model, "ngram", or None for no drafter."""
        if draft is None or draft == "none":
            return None
        return "ngram" if draft == "ngram" else self.load(draft)


ACCEPT_METAVAR = "exact|top-N"
ACCEPT_HELP = (
    "Which drafted tokens are accepted: exact changes no answer; top-3 is lossy and accepts those "
    "among the target's 3 likeliest."
)


@dataclass(frozen=True)
class DraftOptions:
    """The requested drafting.

    Attributes:
        draft: a bundle, a demo's name, or "ngram"; None for no drafter.
        tokens, tree: fixed shape of drafts; without either, a bandit chooses the shape.
        accept: acceptance rule for drafted tokens.
    """

    draft: str | None
    tokens: int | None = None
    tree: tuple[int, ...] | Literal["ucb"] | None = None
    accept: str = "exact"


def all_there(bundles: Sequence[str], files: Sequence[Path] = ()) -> None:
    """Check every bundle and file that a program is about to read.

    Raises BundleError or InputError that lists everything missing or unreadable.
    """
    from edge.bundle import open_bundle
    from edge.runtime.model import resolve

    faults = Faults()
    kind: type[EdgeError] = InputError
    for name in dict.fromkeys(bundles):
        try:
            open_bundle(resolve(name)).close()
        except EdgeError as problem:
            where = ": ".join(part for part in (problem.file or name, problem.field) if part)
            faults.add(where, problem.message, problem.remedy)
            kind = type(problem)
    for path in files:
        if not path.is_file():
            faults.add(str(path), "is not a file", "give the path of a text file")
    faults.refuse(kind)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    """A group of options: the drafter, and the shape of its drafts."""

    draft: Annotated[str, running(help="Drafter: another bundle, ngram, or none.")] = "none"
    draft_tokens: Annotated[
        int | None, running(metavar="N", help="Draft chains of this many tokens.")
    ] = None
    draft_tree: Annotated[
        str | None,
        running(
            metavar="N,N,…|ucb",
            help="Draft trees with this many children at each depth, such as 3,2,2,1,1; ucb "
            "chooses one of three trees.",
        ),
    ] = None
    draft_auto: Annotated[
        bool, running("--draft-auto", help="Find the best shape of drafts by trial. [default]")
    ] = False
    accept: Annotated[str, running(metavar="exact|top-N", help=ACCEPT_HELP)] = "exact"

    def read(self, others: Mapping[str, Any] | None = None) -> DraftOptions:
        """Check the options together, without loading anything.

        `others`: further options, with their values, that require a drafter.
        Raises InputError, or BundleError when the drafter does not exist.
        """
        from edge.runtime.speculate.accept import rule_of

        draft, tokens = self.draft, self.draft_tokens
        shape = read_shape(tokens, self.draft_tree, self.draft_auto)
        rule = rule_of(self.accept, "--accept").name
        if draft == "":
            raise InputError("is empty", field="--draft", remedy="give a bundle, ngram, or none")
        if draft != "none":
            if draft != "ngram":
                from edge.runtime.model import resolve

                resolve(draft, words=("ngram", "none"))
            return DraftOptions(draft, tokens, shape, rule)
        given = {"--draft-tokens": tokens, "--draft-tree": self.draft_tree,
                 "--draft-auto": self.draft_auto or None,
                 "--accept": None if rule == "exact" else rule, **(others or {})}  # fmt: skip
        for option, value in given.items():
            if value is not None:
                raise InputError(
                    "needs --draft", field=option, remedy="add --draft ngram, or --draft BUNDLE"
                )
        return DraftOptions(None)


def read_shape(
    tokens: int | None, tree: str | None, auto: bool
) -> tuple[int, ...] | Literal["ucb"] | None:
    """Return `--draft-tree` as numbers, or `ucb`.

    Raises InputError when more than one of the three options gives a shape.
    """
    given = {"--draft-tokens": tokens is not None, "--draft-tree": tree is not None,
             "--draft-auto": auto}  # fmt: skip
    options = [option for option, is_given in given.items() if is_given]
    if len(options) > 1:
        raise InputError(
            f"cannot be given together with {options[1]}", field=options[0], remedy="choose one"
        )
    if tree is None or tree == "ucb":
        return None if tree is None else "ucb"
    return numbers(tree, int, "--draft-tree", "3,2,1")


def numbers(text: str, kind: type[Number], option: str, such_as: str) -> tuple[Number, ...]:
    """Parse `128,512` into numbers. Raises InputError."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(
            f"{text!r:.60} is not a list of {what}", field=option, remedy=f"such as {such_as}"
        ) from None


def write_text(path: Path, text: str, option: str) -> None:
    """Write the file that an option names. Raises InputError."""
    try:
        path.write_text(text, "utf-8")
    except OSError as problem:
        message = f"cannot be written: {problem.strerror}"
        raise InputError(message, file=path, field=option) from problem


def self_drafting_note(target: Model, draft: Model | Literal["ngram"] | None) -> str | None:
    """Return a note if the drafter is the target itself: each drafted token then costs a step."""
    if draft is None or draft == "ngram" or draft.fingerprint != target.fingerprint:
        return None
    return (
        f"note: {target.path.name} drafts for itself, which gains nothing: a drafted token costs a "
        "whole step (draft with a smaller bundle that has the same tokenizer, or with ngram)"
    )


def check_engine(engine: str, provider: str | None) -> None:
    """Check --engine and --provider before anything is loaded.

    Raises InputError that names the option; EngineError if EDGE_ORT_PROVIDERS is at fault.
    """
    try:
        check_provider(engine, provider)
    except EngineError as problem:
        if problem.field not in ("engine", "provider"):
            raise
        raise InputError(
            problem.message, field=f"--{problem.field}", remedy=problem.remedy
        ) from None


@contextmanager
def named_as_options(context: str = "--context") -> Iterator[None]:
    """Make errors about session and sampling parameters name the command-line options.

    `context`: the option that sets a state's capacity.
    """
    try:
        yield
    except InputError as problem:
        field = problem.field
        # the field is already an option, or a place in a file
        if field is None or field.startswith("-") or problem.file is not None:
            raise
        raise InputError(
            # the message names the parameters of further faults and of conflicts
            re.sub(
                r"(; |cannot be given together with )([a-z][\w.]*)(?=: |$)",
                lambda match: match[1] + _option(match[2], context),
                problem.message,
            ),
            file=problem.file,
            field=_option(field, context),
            remedy=problem.remedy and re.sub(r"\bdraft_(\w+)", r"--draft-\1", problem.remedy),
        ) from None


def _option(parameter: str, context: str) -> str:
    if parameter == "capacity":
        return context
    return "--" + parameter.partition(".")[0].replace("_", "-")
