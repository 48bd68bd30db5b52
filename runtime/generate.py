"""One answer: prefill in chunks, then step and sample until something ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from edge.errors import EdgeError, InputError
from edge.runtime.context import Context, Logits
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.decode import Plain, Source, Speculation, Speculative
from edge.runtime.speculate.draft import Drafting
from edge.text.stream import StopMatcher, StreamDecoder
from edge.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "deadline", "context"]


@dataclass(frozen=True)
class Timings:
    """Seconds on a monotonic clock, from the request on, tokenizing not included.

    Attributes:
        prompt_s: until the prompt was consumed.
        token_s: when each token was sampled.
        total_s: until the answer ended.
    """

    prompt_s: float
    token_s: tuple[float, ...]
    total_s: float

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, or None when there was none."""
        return self.token_s[0] if self.token_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Generation speed over the gaps between tokens; None for fewer than two."""
        span = self.token_s[-1] - self.token_s[0] if self.token_s else 0.0
        return (len(self.token_s) - 1) / span if span > 0 else None


@dataclass(frozen=True)
class GenerationResult:
    """How an answer ended.

    Attributes:
        text: everything that was given out.
        tokens: everything that was sampled, an end token and those of a stop string included.
        finish_reason: `stop`: an end token or stop string; `length`: max_tokens; `context`: the KV
            caches are full; `cancelled` or `deadline`: the text is what there was.
        prompt_tokens: tokens that were fed for this answer before the first was sampled.
        reused_tokens: tokens of the prompt that the state already held.
        speculation: what drafting did; None without a drafter.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    timings: Timings
    speculation: Speculation | None = None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Prefill speed; None when nothing was fed."""
        spent = self.timings.prompt_s
        return self.prompt_tokens / spent if self.prompt_tokens and spent > 0 else None


class Opening(NamedTuple):
    """How a turn begins.

    Attributes:
        tokens: to feed.
        reused: how many more tokens of the prompt the state already holds.
        logits: [V] after them all, where the turn was answered before: there is nothing to feed.
    """

    tokens: Sequence[int]
    reused: int
    logits: Logits | None = None


class Owner(Protocol):
    """What an answer needs of its session."""

    def held(self) -> AbstractContextManager[None]:
        """The session, for this thread. Raises EngineError while another thread has it."""

    def opened(self) -> Opening:
        """Prepare the turn."""

    def prompted(self, logits: Logits) -> None:
        """The prompt has been fed; `logits` [V] are valid until the next run."""

    def closed(self, answer: Answer, kept: int | None) -> None:
        """End the turn: keep that many of the answer's tokens, or with None undo all of it."""


class Answer:
    """The making of one answer. `Generation` is what callers hold."""

    def __init__(
        self,
        owner: Owner,
        context: Context,
        tokenizer: Tokenizer,
        sampler: Sampler,
        drafting: Drafting | None,
        *,
        continued: bool,
    ) -> None:
        """`continued`: the answer goes on in the prompt's text, so its first space counts."""
        self.owner = owner
        self.sampler = sampler
        self.params = sampler.params
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.cancelled = threading.Event()
        self.done = False
        self.result: GenerationResult | None = None
        self._context = context
        self._tokenizer = tokenizer
        self._continued = continued
        self._decoder = StreamDecoder(tokenizer, continued=continued)
        self._matcher = StopMatcher(self.params.stop)
        self._recent: list[int] = []
        self._decoding = self._decoding_with(drafting)
        self._began = time.monotonic()
        self._times: list[float] = []
        self._prompt = (0, 0)
        self._prompt_s = 0.0

    def _decoding_with(self, drafting: Drafting | None) -> Plain | Speculative:
        source = Source(
            self._context,
            self.sampler,
            self._allowed,
            self._recent,
            self._tokenizer.special_ids,
            lambda: self.params.max_tokens - len(self.tokens),
            self._tokenizer.vocab_size,
            self.params.plainly_greedy and not self._tokenizer.unassigned,
        )
        if drafting is None:
            return Plain(source)
        return Speculative(source, drafting.drafter, drafting.policy, drafting.rule)

    # -- the loop --------------------------------------------------------------------------------

    def _halted(self) -> FinishReason | None:
        if self.cancelled.is_set():
            return "cancelled"
        deadline = self.params.deadline_s
        if deadline is not None and time.monotonic() - self._began >= deadline:
            return "deadline"
        return None

    def pieces(self) -> Generator[str, None, None]:
        """Text as it is decided. Closing this ends the answer as it stands."""
        try:
            logits = self._prefill()
            if logits is None:
                self.end(self._halted() or "cancelled", None)
                return
            for piece in self._answer(logits):
                self.text.append(piece)
                yield piece
        except GeneratorExit:
            self.text.append(self._held_text())
            self.end("cancelled", self._kept())
            raise
        except BaseException:
            # of a step that failed or was interrupted nothing is certain: back to the beginning
            self.done = True
            self.owner.closed(self, None)
            raise

    def _prefill(self) -> Logits | None:
        opening = self.owner.opened()
        logits = opening.logits
        if logits is None:
            logits = self._context.feed(opening.tokens, self._halted)
        self._prompt = (len(opening.tokens), opening.reused)
        self._prompt_s = time.monotonic() - self._began
        if logits is not None:
            self.owner.prompted(logits)
        return logits

    def _answer(self, logits: Logits) -> Iterator[str]:
        self._recent[:] = self._said_lately()
        reason: FinishReason = "stop"
        for token in self._decoding.tokens(logits):
            self.tokens.append(token)
            self._times.append(time.monotonic() - self._began)
            if token in self._tokenizer.eos:
                break
            if token not in self._tokenizer.special_ids:
                self._recent.append(token)
            if piece := self._matcher.feed(self._decoder.feed(token)):
                yield piece
            ended = self._ended(self.params.max_tokens)
            if ended is not None:
                reason = ended
                break
        if tail := self._held_text():
            yield tail
        self.end(reason, self._kept())

    def _ended(self, max_tokens: int) -> FinishReason | None:
        if self._matcher.stopped:
            return "stop"
        if len(self.tokens) >= max_tokens:
            return "length"
        return self._halted() or ("context" if self._context.full else None)

    def _said_lately(self) -> list[int]:
        """What a repetition penalty looks at. Special tokens end turns: they are no repetition."""
        window = self.params.repetition_window
        if self.params.repetition_penalty == 1 or not window:
            return []
        special = self._tokenizer.special_ids
        return [token for token in self._context.tokens[-window:] if token not in special]

    def _allowed(self, logits: Logits) -> Logits:
        """Logits [tokenizer's vocab_size]: padding rows and ids that mean nothing cannot be drawn.

        A penalty and a bias copy what they change, so this may be a view of the engine's memory.
        """
        logits = logits[: self._tokenizer.vocab_size]
        if self._tokenizer.unassigned:
            logits = logits.copy()
            logits[list(self._tokenizer.unassigned)] = -np.inf
        return logits

    # -- the end ---------------------------------------------------------------------------------

    def _held_text(self) -> str:
        return self._matcher.feed(self._decoder.finish()) + self._matcher.finish()

    def _kept(self) -> int:
        """How many tokens the shown text is made of: those of a stop string are not among them."""
        count = len(self.tokens)
        if not self._matcher.stopped:
            return count
        shown = sum(map(len, self.text))
        while count and len(self._decoded(count)) > shown:
            count -= 1
        return count

    def _decoded(self, count: int) -> str:
        return self._tokenizer.decode(self.tokens[:count], continued=self._continued)

    def end(self, reason: FinishReason, kept: int | None) -> None:
        """Record the result and hand the turn back."""
        self.done = True
        self._decoding.settle()
        prompt, reused = self._prompt
        self.result = GenerationResult(
            text="".join(self.text),
            tokens=tuple(self.tokens),
            finish_reason=reason,
            prompt_tokens=prompt,
            reused_tokens=reused,
            timings=Timings(self._prompt_s, tuple(self._times), time.monotonic() - self._began),
            speculation=self._decoding.figures,
        )
        self.owner.closed(self, kept)


class Generation(Iterator[str]):
    """An answer being made: iterate it for pieces of text, then read `result`.

    Closing it, or dropping it half-way, ends the answer like `cancel`. Whatever ends it, session
    and transcript agree afterwards. An answer that ends before its first token leaves no trace, and
    neither does one that ends in an error.
    """

    def __init__(self, answer: Answer) -> None:
        # the answer does not know this object, so that dropping it runs __del__ at once
        self._answer = answer
        self._pieces = answer.pieces()

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        with self._answer.owner.held():
            return next(self._pieces)

    def cancel(self) -> None:
        """End the answer within one step or chunk; from any thread, any time."""
        self._answer.cancelled.set()

    def close(self) -> None:
        """End the answer here. Nothing happens when it has ended."""
        if self._answer.done:
            return
        with self._answer.owner.held():
            self._pieces.close()
            if not self._answer.done:  # it never began
                self._answer.end("cancelled", None)

    def __del__(self) -> None:
        with suppress(EdgeError, AttributeError):
            self.close()

    def finish(self) -> GenerationResult:
        """Run to the end and return the result."""
        for _ in self:
            pass
        return self.result

    @property
    def text(self) -> str:
        """The text given out so far."""
        return "".join(self._answer.text)

    @property
    def result(self) -> GenerationResult:
        """How it ended. Raises InputError while it has not."""
        if self._answer.result is None:
            raise InputError(
                "the answer is not finished, or ended in an error",
                field="result",
                remedy="iterate to the end, call finish(), or close() it",
            )
        return self._answer.result
