"""Typed errors. Each says what is wrong, where, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any


def some(names: Sequence[str], most: int = 5) -> str:
    """List the first `most` names and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _readable(text: str, limit: int = 1000) -> str:
    """Cut the middle out of text longer than `limit`: text from files may be of any length.

    It is cut between two words, if they are not long.
    """
    if len(text) <= limit:
        return text
    start = re.sub(r"\s+\S{0,40}$", "", text[: limit // 2])
    end = re.sub(r"^\S{0,40}\s+", "", text[-limit // 4 :])
    return f"{start} … {end}"


# maximum characters of a message that lists faults; faults that do not fit are counted
_MAX_LISTED_CHARACTERS = 900


class EdgeError(Exception):
    """Base class of the errors that `edge` raises on purpose.

    Attributes:
        file: the file or folder at fault, or None.
        field: the field, tensor or parameter at fault, or None.
        remedy: what the user can do about it, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | PathLike[str] | None = None,
        field: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.message = _readable(message)
        self.file = None if file is None else str(file)
        self.field = None if field is None else _readable(field, 200)
        self.remedy = remedy
        super().__init__(self.message)

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.field) if part)
        text = f"{where}: {self.message}" if where else self.message
        if not self.remedy:
            return text
        return f"{text}\n{self.remedy}" if "\n" in self.remedy else f"{text} ({self.remedy})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.file, self.field, self.remedy))


def _rebuild(
    kind: type[EdgeError], message: str, file: str | None, field: str | None, remedy: str | None
) -> EdgeError:
    return kind(message, file=file, field=field, remedy=remedy)


class CheckpointError(EdgeError):
    """A checkpoint directory cannot be read as a model."""


class ExportError(EdgeError):
    """A readable checkpoint cannot be exported as requested."""


class PullError(EdgeError):
    """A model cannot be downloaded, due to its name, its files, the network or the disk."""


class BundleError(EdgeError):
    """A bundle is incomplete, altered, or of an unknown version."""


class StateError(EdgeError):
    """A saved or live state does not fit the request."""


class TokenizerError(EdgeError):
    """A tokenizer or chat template cannot be loaded or cannot handle its input."""


class InputError(EdgeError):
    """A request is out of range: prompt, token ids, sampling parameters, limits."""


class ContextFullError(InputError):
    """The attention layers' KV cache has no room for the requested tokens."""


class EngineError(EdgeError):
    """An engine is unavailable here, or failed while running."""


class Faults:
    """All faults of one input, collected to be reported in one error."""

    def __init__(self) -> None:
        self._faults: list[tuple[str, str]] = []
        self._remedies: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._faults)

    def add(self, field: str, message: str, remedy: str | None = None) -> None:
        """Record a fault, once."""
        if (field, message) not in self._faults:
            self._faults.append((field, message))
        if remedy:
            self._remedies[remedy] = None

    def count(self, field: str, messages: Iterable[str], remedy: str | None = None) -> None:
        """Record the first of several faults of one kind, and how many more there are."""
        first, others = None, 0
        for message in messages:
            first, others = first or message, others + (first is not None)
        if first is not None:
            self.add(field, f"{first}, and {others} more like it" if others else first, remedy)

    def extend(self, others: Faults) -> None:
        """Append the faults recorded in `others`."""
        for field, message in others._faults:
            self.add(field, message)
        self._remedies |= others._remedies

    def refuse(
        self,
        kind: type[EdgeError],
        *,
        file: str | PathLike[str] | None = None,
        remedy: str | None = None,
    ) -> None:
        """Raise `kind` if there are faults: the first with its field, then the others.

        `remedy` replaces the remedies recorded with the faults.
        """
        if not self._faults:
            return
        (field, message), *others = self._faults
        listed = 0
        for where, text in others:
            more = f"; {where}: {text}"
            if len(message) + len(more) > _MAX_LISTED_CHARACTERS:
                break
            message, listed = message + more, listed + 1
        if left := len(others) - listed:
            message += f"; and {left} more"
        remedy = remedy or "; ".join(self._remedies) or None
        raise kind(message, file=file, field=field or None, remedy=remedy)
