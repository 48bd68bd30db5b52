"""What `--draft…` options mean, wherever they are: who drafts, in which shape, and what stands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from edge.errors import InputError

if TYPE_CHECKING:
    from edge.runtime.model import Model

ACCEPT_METAVAR = "exact|top-N"
ACCEPT_HELP = (
    "Which drafted tokens stand: exact loses nothing; top-3 is lossy: those among the target's 3 "
    "likeliest."
)


@dataclass(frozen=True)
class DraftOptions:
    """What was asked for.

    Attributes:
        draft: a bundle, a demonstration's name, or "ngram"; None for nobody.
        tokens, tree: of a fixed shape; neither leaves it to a bandit.
        accept: by which rule drafted tokens stand.
    """

    draft: str | None
    tokens: int | None = None
    tree: tuple[int, ...] | None = None
    accept: str = "exact"


def read(
    draft: str | None,
    tokens: int | None,
    tree: str | None,
    auto: bool,
    accept: str,
    others: Mapping[str, Any] | None = None,
) -> DraftOptions:
    """What the options say together; nothing is loaded yet. `others`: options, with their values,
    that mean nothing without a drafter, as those here do. Raises InputError.
    """
    shape, rule = branches(tokens, tree, auto), _accepted(accept)
    if draft == "":
        raise InputError("is empty", field="--draft", remedy="a bundle, ngram, or none")
    if draft is not None and draft != "none":
        return DraftOptions(draft, tokens, shape, rule)
    given = {"--draft-tokens": tokens, "--draft-tree": tree, "--draft-auto": auto or None,
             "--accept": None if rule == "exact" else rule, **(others or {})}  # fmt: skip
    for option, value in given.items():
        if value is not None:
            raise InputError("needs --draft", field=option, remedy="--draft ngram, or a bundle")
    return DraftOptions(None)


def drafter(
    draft: str | None,
    engine: str,
    threads: int | None,
    spin: bool,
    provider: str | None = None,
) -> Model | Literal["ngram"] | None:
    """Load who drafts: another bundle; "ngram" is no bundle, "none" nobody."""
    from edge.runtime.model import load

    if draft is None or draft == "none":
        return None
    if draft == "ngram":
        return "ngram"
    return load(draft, engine=engine, threads=threads, spin=spin, provider=provider)


def of_itself(target: Model, draft: Model | Literal["ngram"] | None) -> str | None:
    """A word about a drafter that is the target itself: its every draft costs as many steps."""
    if draft is None or draft == "ngram" or draft.fingerprint != target.fingerprint:
        return None
    return (
        f"note: {target.path.name} drafts for itself, which gains nothing: a token drafted costs a "
        "whole step (draft with a smaller bundle of the same tokenizer, or with ngram)"
    )


@contextmanager
def named() -> Iterator[None]:
    """Refusals of a session's parameters name the options that they came from."""
    try:
        yield
    except InputError as problem:
        field = problem.field or ""
        if not re.match(r"draft\b|draft_", field):
            raise
        raise InputError(
            problem.message,
            file=problem.file,
            field="--" + field.replace("_", "-"),
            remedy=problem.remedy and re.sub(r"\bdraft_(\w+)", r"--draft-\1", problem.remedy),
        ) from None


def _accepted(accept: str) -> str:
    """What `--accept` says, when it says something. Raises InputError."""
    from edge.runtime.speculate.rule import rule_of

    return rule_of(accept, "--accept").name


def branches(tokens: int | None, tree: str | None, auto: bool) -> tuple[int, ...] | None:
    """What `--draft-tree` says, which is one way of three. Raises InputError."""
    given = {"--draft-tokens": tokens is not None, "--draft-tree": tree is not None,
             "--draft-auto": auto}  # fmt: skip
    options = [option for option, is_given in given.items() if is_given]
    if len(options) > 1:
        raise InputError(
            f"cannot be given together with {options[1]}", field=options[0], remedy="choose one"
        )
    if tree is None:
        return None
    try:
        return tuple(int(count) for count in tree.split(","))
    except ValueError:
        raise InputError(
            f"{tree!r:.60} is no list of numbers", field="--draft-tree", remedy="such as 3,2,1"
        ) from None
