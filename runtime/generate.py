"""One answer: prefill, then sample and step until something ends it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.errors import EdgeError, InputError
from edge.runtime.context import Context, Logits
from edge.runtime.parameters import SamplingParams
from edge.runtime.result import FinishReason, GenerationResult, Timings, TokenLogprob
from edge.runtime.sampling import Sampler, logprob_of
from edge.text.stream import StopMatcher, StreamDecoder
from edge.text.tokenizer import Tokenizer
from edge.text.tools import CallDelta

if TYPE_CHECKING:
    from edge.runtime.constrain.tools import ToolUse
    from edge.runtime.speculate.decode import Drafting, Speculation


def generate(
    answer: Answer,
    context: Context,
    sampler: Sampler,
    drafting: Drafting | None,
    *,
    prefill: Callable[[], Logits | None],
    finish: Callable[[bool], None],
) -> Generator[str, None, None]:
    """Make an answer: its text as it is decided, "" where only a tool call grew, after a
    first "" before anything has run.

    `prefill` consumes the prompt and returns the logits [V] after it, or None when the answer was
    halted. `finish` is called once, however this ends, with whether it succeeded: of a step that
    failed or was interrupted nothing is certain.
    """
    ended: FinishReason | None = None
    try:
        yield ""
        logits = prefill()
        answer.prompt_s = answer.seconds()
        if logits is None:
            ended = answer.halted()
        else:
            tokenizer = answer.tokenizer
            steps = Stepper(
                context, sampler, tokenizer.vocab_size,
                special=tokenizer.special_ids, unassigned=tokenizer.unassigned,
            )  # fmt: skip
            decoding = steps if drafting is None else drafting.begin(steps, answer)
            with closing(decoding.tokens(logits)) as tokens:
                for token in tokens:
                    piece = answer.add(token, steps.noted)
                    if piece is not None:
                        yield piece
                    if ended := _ended(token, answer, context, sampler):
                        break
            if tail := answer.rest():
                yield tail
    except GeneratorExit:  # closed, or dropped half-way: the answer ends here
        ended = "cancelled"
        answer.rest()
    except BaseException:
        finish(False)
        raise
    answer.end(ended or "cancelled")
    finish(True)


def _ended(token: int, answer: Answer, context: Context, sampler: Sampler) -> FinishReason | None:
    """Why the answer ends after this token, if it does."""
    mask, capacity = sampler.mask, context.capacity
    if token in answer.tokenizer.eos or answer.stops.stopped:
        return "stop"
    if mask is not None and mask.complete:
        return "stop"
    if len(answer.tokens) >= answer.params.max_tokens:
        return "length"
    full = capacity is not None and len(context.tokens) >= capacity
    return answer.halted() or ("context" if full else None)


class Stepper:
    """Takes a context on by one token at a time.

    Attributes:
        recent: what the penalties look at: special tokens end turns and are no repetition.
        vocab_size: ids that may be sampled are below it.
        noted: log probabilities of sampled tokens, where they are asked for: in order, those of an
            accepted draft at once.
    """

    def __init__(
        self,
        context: Context,
        sampler: Sampler,
        vocab_size: int,
        *,
        special: Collection[int] = (),
        unassigned: Sequence[int] = (),
    ) -> None:
        """`special`: ids of control tokens. `unassigned`: ids that stand for nothing."""
        self.context = context
        self.sampler = sampler
        self.special = special
        self.vocab_size = vocab_size
        window = sampler.params.remembered
        said = context.tokens[-window:] if window else ()
        self.recent = [token for token in said if token not in self.special]
        self._unassigned = list(unassigned)
        self._greedy = sampler.params.plainly_greedy and not self._unassigned
        self.noted: deque[TokenLogprob] = deque()

    def tokens(self, logits: Logits) -> Generator[int, None, None]:
        """Sample from the logits after the prompt, then step and sample, without end."""
        token = self.choose(logits)
        while True:
            self.context.pending = token
            self.say(token)
            yield token
            token = self.step(token)

    def say(self, token: int) -> None:
        """A token joins the answer."""
        if token not in self.special:
            self.recent.append(token)
        if self.sampler.mask is not None:
            self.sampler.mask.say(token)

    def step(self, token: int) -> int:
        """Consume a token and sample the next one; no logits are looked at where the engine finds
        the likeliest token itself.
        """
        context = self.context
        engine, state, run = context.engine, context.state, np.asarray([[token]], np.int64)
        if self._greedy and engine.finds_argmax:
            best = int(engine.run_greedy(run, state)[0])
            if best < self.vocab_size:
                context.tokens.append(token)
                context.pending = None
                return best
            state.rewind(1)  # padding of the vocabulary, which no model was taught to say
        logits = engine.run(run, state)
        context.tokens.append(token)
        context.pending = None
        return self.choose(logits[0, -1])

    def choose(self, logits: Logits) -> int:
        """Sample a token from an engine's logits [V]."""
        token = self.sampler(self.allowed(logits), self.recent)
        self.note(logits, token)
        return token

    def note(self, logits: Logits, token: int) -> None:
        """Keep what these logits [V] give the token that was chosen, where that is asked for."""
        count = self.sampler.params.logprobs
        if count is not None:
            self.noted.append(logprob_of(self._possible(logits), token, count))

    def allowed(self, logits: Logits, path: Sequence[int] = ()) -> Logits:
        """Logits [vocab_size] after `path`, drafted tokens that come after what was said: padding
        rows, ids that mean nothing and what the answer's grammar excludes cannot be drawn.

        A penalty and a bias copy what they change, so this may be a view of the engine's memory.
        """
        return self.sampler.allowed(self._possible(logits), path)

    def _possible(self, logits: Logits) -> Logits:
        logits = logits[: self.vocab_size]
        if self._unassigned:
            logits = logits.copy()
            logits[self._unassigned] = -np.inf
        return logits


class Answer:
    """An answer while it is made.

    Attributes:
        tokenizer: of its tokens.
        continued: it continues the prompt's text, so its first space counts.
        prompt_tokens, reused_tokens: see `GenerationResult`; the first grows while a prompt is fed.
        prompt_length: how many tokens are to be fed.
        logprobs: of the tokens, where they are asked for.
        given: characters given out, those of calls included.
        stops: looks for stop strings in the text.
        reader: finds calls of tools in the text, where there are tools.
        kept: how many of the tokens the text is made of: those of a stop string are not among them.
        result: how it ended, once it has and was no failure.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        continued: bool,
        tools: ToolUse | None = None,
    ) -> None:
        self.params, self.tokenizer, self.continued = params, tokenizer, continued
        self.stops = StopMatcher(params.stop)
        self.reader = tools.reader() if tools else None
        self._decoder = StreamDecoder(
            tokenizer, continued=continued, spelled=tools.spelled if tools else {}
        )
        self._decoded = 0  # characters
        self.tokens: list[int] = []
        self.token_s: list[float] = []
        self.logprobs: list[TokenLogprob] = []
        self.text: list[str] = []
        self.given = 0
        self.cancelled = threading.Event()
        self.prompt_tokens = self.prompt_length = self.reused_tokens = self.kept = 0
        self.prompt_s = 0.0
        self.speculation: Speculation | None = None
        self.result: GenerationResult | None = None
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Seconds since it was asked for."""
        return time.monotonic() - self._began

    def halted(self) -> FinishReason | None:
        """Why it has to end before the next run, if it has to."""
        if self.cancelled.is_set():
            return "cancelled"
        deadline = self.params.deadline_s
        if deadline is not None and self.seconds() >= deadline:
            return "deadline"
        return None

    def add(self, token: int, noted: deque[TokenLogprob]) -> str | None:
        """A token joins the answer: the text to be shown, None where none is decided. The first of
        `noted`, where there are any, is its own.
        """
        self.tokens.append(token)
        self.token_s.append(self.seconds())
        if noted:
            self.logprobs.append(replace(noted.popleft(), at=self._decoded))
        if token in self.tokenizer.eos:
            return None
        text = self._decoder.feed(token)
        self._decoded += len(text)
        decided = self.stops.feed(text)
        return self._give(decided) if decided else None

    def rest(self) -> str:
        """What is to be shown of the text that was held back, when no token comes any more."""
        return self._give(self.stops.feed(self._decoder.finish()) + self.stops.finish(), last=True)

    def _give(self, text: str, *, last: bool = False) -> str:
        """What is to be shown of decided text: not what calls a tool."""
        self.given += len(text)
        if self.reader is not None:
            text = self.reader.feed(text)
            text += self.reader.finish() if last else ""
        if text:
            self.text.append(text)
        return text

    def end(self, reason: FinishReason) -> None:
        """Record the result."""
        self.kept = len(self.tokens)
        while self.stops.stopped and self.kept and self._length(self.kept) > self.given:
            self.kept -= 1
        self.result = GenerationResult(
            text="".join(self.text),
            tokens=tuple(self.tokens),
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            timings=Timings(self.prompt_s, tuple(self.token_s), self.seconds()),
            speculation=self.speculation,
            logprobs=tuple(self.logprobs),
            tool_calls=() if self.reader is None else tuple(self.reader.calls),
        )

    def _length(self, count: int) -> int:
        """Characters of the first tokens."""
        return len(self.tokenizer.decode(self.tokens[:count], continued=self.continued))


class Generation(Iterator[str]):
    """An answer being made: iterate it for pieces of text, then read `result`.

    Under `asyncio`, `async for` iterates it and `await` runs it to its `result`. The model runs
    in a worker thread; a task that is cancelled ends the answer within one step or chunk.

    Closing it, or dropping it half-way, ends the answer like `cancel`. Whatever ends it, session
    and transcript agree afterwards. An answer that ends before its first token leaves no trace, and
    neither does one that ends in an error.
    """

    def __init__(
        self,
        answer: Answer,
        pieces: Generator[str, None, None],
        hold: AbstractContextManager[None],
    ) -> None:
        """`pieces`: of `generate`. `hold`: the session, for this thread; raises EngineError while
        another thread has it.
        """
        # `pieces` does not know this object, so that dropping it runs __del__ at once
        self._answer, self._pieces, self._hold = answer, pieces, hold
        next(pieces)

    def __repr__(self) -> str:
        how = "it has ended: see text and result" if self.ended else "iterate it, or call finish()"
        return f"<Generation: {how}>"

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        with self._hold:
            return next(self._pieces)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> str:
        from edge.runtime.awaiting import in_worker, next_piece

        # the worker must not know this object, so that dropping it runs __del__ at once
        piece = await in_worker(
            partial(next_piece, self._pieces, self._hold), self.cancel, self.close
        )
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        from edge.runtime.awaiting import in_worker

        return in_worker(self.finish, self.cancel, self.close).__await__()

    def cancel(self) -> None:
        """End the answer within one step or chunk; from any thread, any time."""
        self._answer.cancelled.set()

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return getgeneratorstate(self._pieces) == GEN_CLOSED

    def stopped(self) -> bool:
        """Whether it has ended, as it does here if it was cancelled; for who holds the session."""
        if not self.ended and self._answer.cancelled.is_set():
            self._pieces.close()
        return self.ended

    def close(self) -> None:
        """End the answer here. Nothing happens when it has ended."""
        if not self.ended:
            with self._hold:
                self._pieces.close()

    def __del__(self) -> None:
        with suppress(EdgeError, AttributeError):
            self.close()

    def finish(self) -> GenerationResult:
        """Run to the end and return the result."""
        for _ in self:
            pass
        return self.result

    @property
    def prefill(self) -> tuple[int, int]:
        """How many tokens of the prompt have been fed, and how many are to be; from any thread.

        (0, 0) until it is known which tokens the state already holds.
        """
        return self._answer.prompt_tokens, self._answer.prompt_length

    @property
    def text(self) -> str:
        """The text given out so far."""
        return "".join(self._answer.text)

    def logprobs(self, start: int = 0) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the tokens whose text has begun to appear, from `start` on."""
        answer = self._answer
        return tuple(takewhile(lambda one: one.at < answer.given, answer.logprobs[start:]))

    def call_deltas(self) -> tuple[CallDelta, ...]:
        """What has joined calls of tools since this was asked last."""
        reader = self._answer.reader
        if reader is None:
            return ()
        found, reader.deltas = tuple(reader.deltas), []
        return found

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
