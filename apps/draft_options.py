"""What `--draft…` options mean, wherever they are: who drafts, in which shape, and what stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from edge.errors import InputError

if TYPE_CHECKING:
    from edge.runtime.model import Model


def drafter(
    draft: str | None, engine: str, threads: int | None, spin: bool
) -> Model | Literal["ngram"] | None:
    """Load who drafts: another bundle; "ngram" is no bundle, "none" nobody."""
    from edge.runtime.model import load

    if draft is None or draft == "none":
        return None
    return "ngram" if draft == "ngram" else load(draft, engine=engine, threads=threads, spin=spin)


def accepted(accept: str) -> str:
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
