"""Documents as token ids: which ids are predicted, and the bytes and words they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edge.apps.evaluate.texts import Block, Dialogue
from edge.errors import InputError
from edge.text.template import ChatTemplate, Message
from edge.text.tokenizer import Segment, Tokenizer

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Part:
    """Consecutive ids of a document.

    Attributes:
        ids: int64 [n].
        wanted: bool [n], true for ids to predict.
        sizes: int64 [n], bytes of text that each id stands for.
        bytes: UTF-8 bytes of the text that the wanted ids stand for.
        words: words of that text, separated by white space.
        first: whether the document begins here.
    """

    ids: Ints
    wanted: Flags
    sizes: Ints
    bytes: int
    words: int
    first: bool


class Encoder:
    """Convert texts and conversations into parts, with one tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template

    @cached_property
    def _sizes(self) -> Ints:
        tokens = range(self.tokenizer.vocab_size)
        return np.array([len(self.tokenizer.token_bytes(token)) for token in tokens], np.int64)

    def parts(self, blocks: Iterable[Block]) -> Iterator[Part]:
        """Yield one part per block. Raises InputError for messages without a chat template."""
        for block in blocks:
            if isinstance(block, Dialogue):
                yield self.conversation(block.messages)
            else:
                yield self.text(block.text, first=block.first)

    def text(self, text: str, *, first: bool, wanted: bool = True) -> Part:
        """Encode plain text; special tokens written in it stay text.

        `bos` precedes a document if the model's prompts begin with it. It is not predicted.
        """
        ids = (self._opening if first else []) + self._encode(text, first=first)
        array = np.array(ids, np.int64)
        flags = np.full(len(ids), wanted)
        sizes = self._sizes[array]
        if first:
            opening = len(self._opening)
            flags[:opening] = False
            self._discount_prefix_space(ids, sizes, opening)
        if not wanted:
            return Part(array, flags, sizes, 0, 0, first)
        return Part(array, flags, sizes, len(text.encode()), len(text.split()), first)

    def _encode(self, text: str, *, first: bool) -> list[int]:
        if first:
            return self.tokenizer.encode(text)
        # a preceding id tells the tokenizer that this is not the beginning of a text
        return self.tokenizer.encode_segments([Segment("", tokens=(0,)), Segment(text)])[1:]

    def _discount_prefix_space(self, ids: Sequence[int], sizes: Ints, index: int) -> None:
        """Subtract the space that `encode` put before a text from the size of its first id."""
        if self.tokenizer.strips_space and index < len(ids):
            sizes[index] -= self.tokenizer.token_bytes(ids[index]).startswith(b" ")

    @property
    def _opening(self) -> list[int]:
        bos = self.tokenizer.bos
        return [bos] if self.tokenizer.add_bos and bos is not None else []

    def conversation(self, messages: Sequence[Message]) -> Part:
        """Encode a conversation with the chat template.

        The ids of messages and the end token that closes each are predicted. The other ids of the
        template are fed but not predicted.
        """
        if self.template is None:
            raise InputError(
                "the bundle has no chat template for messages",
                remedy="give plain text, or a bundle with a chat template",
            )
        segments = self.template.render(messages, add_generation_prompt=False)
        ids, flags = self._encode_marked(segments)
        texts = [s.text for s in segments if not s.trusted and s.tokens is None]
        opening = self._opening
        if opening and ids[:1] != opening:
            ids, flags = opening + ids, [False, *flags]
        array = np.array(ids, np.int64)
        sizes = self._sizes[array]
        return Part(
            array,
            np.array(flags, np.bool_),
            sizes,
            sum(len(text.encode()) for text in texts),
            sum(len(text.split()) for text in texts),
            True,
        )

    def _encode_marked(self, segments: Sequence[Segment]) -> tuple[list[int], list[bool]]:
        """Return the ids of a rendered prompt, and for each whether it is predicted."""
        ids: list[int] = []
        flags: list[bool] = []
        # texts since the last special token, each with whether it belongs to a message
        pending: list[tuple[str, bool]] = []

        def flush() -> None:
            encoded, marks = self._encode_run(pending, first=not ids)
            ids.extend(encoded)
            flags.extend(marks)
            pending.clear()

        for segment in segments:
            tokens = segment.tokens
            for piece in self.tokenizer.split(segment) if tokens is None else tokens:
                if isinstance(piece, str):
                    pending.append((piece, not segment.trusted))
                    continue
                flush()
                # an end token right after a message: the model has to predict it
                flags.append(flags[-1:] == [True] and piece in self.tokenizer.eos)
                ids.append(piece)
        flush()
        return ids, flags

    def _encode_run(
        self, run: Sequence[tuple[str, bool]], *, first: bool
    ) -> tuple[list[int], list[bool]]:
        """Encode texts joined into one, as in use. Return the ids and the mark of each id's text.

        A text ends where the encoding of all texts up to it ends. An id that differs from that
        encoding spans two texts and counts as part of the second.
        """
        ids: list[int] = []
        marks: list[bool] = []
        for count, (_, mark) in enumerate(run, 1):
            prefix = self._encode("".join(text for text, _ in run[:count]), first=first)
            common = _common_prefix(prefix, ids)
            marks = marks[:common] + [mark] * (len(prefix) - common)
            ids = prefix
        return ids, marks


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def first_wanted(parts: Iterable[Part], limit: int, tokenizer: Tokenizer) -> Iterator[Part]:
    """Yield parts up to the `limit`-th wanted id. A cut part's text is decoded from its ids."""
    for part in parts:
        count = int(part.wanted.sum())
        if count > limit:
            if limit:
                yield _truncate(part, int(np.flatnonzero(part.wanted)[limit]), tokenizer)
            return
        yield part
        limit -= count


def _truncate(part: Part, count: int, tokenizer: Tokenizer) -> Part:
    ids, wanted, sizes = part.ids[:count], part.wanted[:count], part.sizes[:count]
    text = tokenizer.decode([int(token) for token in ids[wanted]])
    return Part(ids, wanted, sizes, int(sizes[wanted].sum()), len(text.split()), part.first)
