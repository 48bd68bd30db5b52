"""An answer token by token, each as soon as it is sampled."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from edge.runtime.awaiting import in_worker
from edge.runtime.result import TokenLogprob

if TYPE_CHECKING:
    from edge.runtime.generate import Answer, Generation

_ENDED = object()


@dataclass(frozen=True)
class Token:
    """One sampled token.

    Attributes:
        id: its id.
        text: the text that it completes: "" for an end token, and while the bytes of a character
            are unfinished. The next tokens complete the character.
        logprob: its log probability, if `SamplingParams.logprobs` requests it, else None.
    """

    id: int
    text: str
    logprob: TokenLogprob | None


class TokenStream(Iterator[Token]):
    """The tokens of an answer from the first on; `async for` iterates it too.

    Tokens of an accepted draft arrive one by one, without a run between them. Tokens of a stop
    string and of tool calls are included, as in `GenerationResult.tokens`.
    """

    def __init__(
        self,
        generation: Generation,
        answer: Answer,
        pieces: Generator[str | None, None, None],
        hold: AbstractContextManager[None],
    ) -> None:
        """`pieces` and `hold`: those of the generation, which ends when nothing refers to it."""
        self._generation, self._answer, self._count = generation, answer, 0
        self._pieces, self._hold = pieces, hold
        self._decoder = answer.decoder()

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Token:
        if not _run(self._answer, self._count, self._pieces, self._hold):
            raise StopIteration
        return self._take()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        # the worker must not know this object, so that dropping it ends the answer at once
        run = partial(_run, self._answer, self._count, self._pieces, self._hold)
        if not await in_worker(run, self._generation.cancel, self._generation.close):
            raise StopAsyncIteration
        return self._take()

    def _take(self) -> Token:
        index, answer = self._count, self._answer
        self._count += 1
        token = answer.tokens[index]
        text = "" if token in answer.tokenizer.eos else self._decoder.feed(token)
        return Token(token, text, answer.logprobs[index] if answer.logprobs else None)


def _run(
    answer: Answer,
    count: int,
    pieces: Generator[str | None, None, None],
    hold: AbstractContextManager[None],
) -> bool:
    """Run until the answer has more than `count` tokens; return False if it ends before."""
    with hold:
        while len(answer.tokens) <= count:
            if next(pieces, _ENDED) is _ENDED:
                return False
    return True
