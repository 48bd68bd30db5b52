"""What a reader must learn of a message, apart from its wording."""

from __future__ import annotations

import re


def facts(*parts: object) -> str:
    """Return a pattern of texts that state all of these: as whole words, in this order, with
    anything between them.
    """
    return "(?s)" + ".*?".join(map(_whole, parts))


def says(text: object, *parts: object) -> bool:
    """Return whether a text states all of these; see `facts`."""
    return re.search(facts(*parts), str(text)) is not None


def _whole(part: object) -> str:
    text = str(part)
    before = r"(?<!\w)" if text[:1].isalnum() else ""
    after = r"(?!\w)" if text[-1:].isalnum() else ""
    return before + re.escape(text) + after
