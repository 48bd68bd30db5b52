"""One answer: prefill, then sample and step until it ends."""

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
    from edge.runtime.token_stream import TokenStream


def generate(
    answer: Answer,
    context: Context,
    sampler: Sampler,
    drafting: Drafting | None,
    *,
    prefill: Callable[[], Logits | None],
    finish: Callable[[bool], None],
) -> Generator[str | None, None, None]:
    """Generate an answer and yield its text, piece by piece: one after each token.

    The first piece is "", before anything has run. Later pieces are "" when only a tool call grew,
    and None when no text is decided yet.

    `prefill` consumes the prompt and returns the logits [V] after it, or None if the answer was
    halted. `finish` is called once, however this ends, with whether it succeeded. After False the
    state is unknown, because a step failed or was interrupted.
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
                    yield answer.add(token, steps.noted)
                    if ended := _finish_reason(token, answer, context, sampler):
                        break
            if tail := answer.rest():
                yield tail
    except GeneratorExit:  # closed or dropped before the end: the answer ends here
        ended = "cancelled"
        answer.rest()
    except BaseException:
        finish(False)
        raise
    answer.end(ended or "cancelled")
    finish(True)


def _finish_reason(
    token: int, answer: Answer, context: Context, sampler: Sampler
) -> FinishReason | None:
    """Return why the answer ends after this token, or None if it continues."""
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
    """Advances a context one token at a time.

    Attributes:
        recent: tokens that the penalties apply to; special tokens end turns and do not count as
            repetition.
        vocab_size: upper bound of ids that may be sampled, exclusive.
        noted: log probabilities of sampled tokens in order, if requested; those of an accepted
            draft arrive together.
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
        """`special`: ids of control tokens. `unassigned`: ids without a meaning."""
        self.context = context
        self.sampler = sampler
        self.special = special
        self.vocab_size = vocab_size
        window = sampler.params.remembered
        history = context.tokens[-window:] if window else ()
        self.recent = [token for token in history if token not in self.special]
        self._unassigned = list(unassigned)
        self._greedy = sampler.params.plainly_greedy and not self._unassigned
        self.noted: deque[TokenLogprob] = deque()

    def tokens(self, logits: Logits) -> Generator[int, None, None]:
        """Sample from the logits after the prompt, then step and sample indefinitely."""
        token = self.choose(logits)
        while True:
            self.context.pending = token
            self.say(token)
            yield token
            token = self.step(token)

    def say(self, token: int) -> None:
        """Add a token to the answer."""
        if token not in self.special:
            self.recent.append(token)
        if self.sampler.mask is not None:
            self.sampler.mask.say(token)

    def step(self, token: int) -> int:
        """Consume a token and sample the next one.

        Plainly greedy sampling reads no logits if the engine finds the likeliest token itself.
        """
        context = self.context
        engine, state, run = context.engine, context.state, np.asarray([[token]], np.int64)
        if self._greedy and engine.finds_argmax:
            best = int(engine.run_greedy(run, state)[0])
            if best < self.vocab_size:
                context.tokens.append(token)
                context.pending = None
                return best
            state.rewind(1)  # vocabulary padding, which no model was trained on
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
        """Record the chosen token's log probability under logits [V], if requested."""
        count = self.sampler.params.logprobs
        if count is not None:
            self.noted.append(logprob_of(self._mask_unassigned(logits), token, count))

    def allowed(self, logits: Logits, path: Sequence[int] = ()) -> Logits:
        """Return logits [vocab_size] after `path`, drafted tokens that follow the answer so far.

        Padding rows are cut off; unassigned ids and tokens that the answer's grammar excludes are
        -inf. The result may be a view of the engine's memory: penalties and biases copy first.
        """
        return self.sampler.allowed(self._mask_unassigned(logits), path)

    def _mask_unassigned(self, logits: Logits) -> Logits:
        logits = logits[: self.vocab_size]
        if self._unassigned:
            logits = logits.copy()
            logits[self._unassigned] = -np.inf
        return logits


class Answer:
    """An answer while it is being generated.

    Attributes:
        tokenizer: decodes the answer's tokens.
        continued: whether the answer continues the prompt's text, so that a leading space counts.
        prompt_tokens, reused_tokens: see `GenerationResult`; the first grows during prefill.
        prompt_length: number of prompt tokens to feed.
        logprobs: log probabilities of the tokens, if requested.
        given: number of characters emitted, including those of tool calls.
        stops: finds stop strings in the text.
        reader: finds tool calls in the text; None without tools.
        kept: number of tokens in the answer, without those of a stop string.
        result: the result once the answer has ended without a failure.
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
        self._spelled = tools.spelled if tools else {}
        self._decoder = self.decoder()
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
        self._started = time.monotonic()

    def decoder(self) -> StreamDecoder:
        """Return a decoder of the answer's tokens, from the first on."""
        return StreamDecoder(self.tokenizer, continued=self.continued, spelled=self._spelled)

    def seconds(self) -> float:
        """Return the seconds since the request."""
        return time.monotonic() - self._started

    def halted(self) -> FinishReason | None:
        """Return why the answer must end before the next run, or None."""
        if self.cancelled.is_set():
            return "cancelled"
        deadline = self.params.deadline_s
        if deadline is not None and self.seconds() >= deadline:
            return "deadline"
        return None

    def add(self, token: int, noted: deque[TokenLogprob]) -> str | None:
        """Add a token to the answer and return the text to show, or None if none is decided yet.

        The first entry of `noted`, if any, belongs to this token.
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
        return self._emit(decided) if decided else None

    def rest(self) -> str:
        """Return the text that was held back and is to be shown, after the last token."""
        return self._emit(self.stops.feed(self._decoder.finish()) + self.stops.finish(), last=True)

    def _emit(self, text: str, *, last: bool = False) -> str:
        """Return the part of decided text to show, without tool calls."""
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
        while self.stops.stopped and self.kept and self._text_length(self.kept) > self.given:
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

    def _text_length(self, count: int) -> int:
        """Return the number of characters of the first `count` tokens."""
        return len(self.tokenizer.decode(self.tokens[:count], continued=self.continued))


class Generation(Iterator[str]):
    """An answer in progress: iterate it for pieces of text, then read `result`.

    Under `asyncio`, `async for` iterates it and `await` runs it to its `result`. The model runs
    in a worker thread; cancelling the task ends the answer within one step or chunk.

    Closing it, or dropping the last reference, ends the answer like `cancel`. However it ends,
    session and transcript agree afterwards. An answer that ends before its first token, or in an
    error, leaves no trace.
    """

    def __init__(
        self,
        answer: Answer,
        pieces: Generator[str | None, None, None],
        hold: AbstractContextManager[None],
    ) -> None:
        """Start at the first piece.

        Args:
            pieces: generator returned by `generate`.
            hold: holds the session for this thread; raises EngineError while another thread does.
        """
        # `pieces` does not know this object, so that dropping it runs __del__ at once
        self._answer, self._pieces, self._hold = answer, pieces, hold
        next(pieces)

    def __repr__(self) -> str:
        status = (
            "it has ended: see text and result" if self.ended else "iterate it, or call finish()"
        )
        return f"<Generation: {status}>"

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        with self._hold:
            while (piece := next(self._pieces)) is None:
                pass
        return piece

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
        """End the answer within one step or chunk. May be called from any thread at any time."""
        self._answer.cancelled.set()

    @property
    def ended(self) -> bool:
        """Whether the answer has ended."""
        return getgeneratorstate(self._pieces) == GEN_CLOSED

    def stopped(self) -> bool:
        """End the answer if it was cancelled, and return whether it has ended.

        The caller must hold the session.
        """
        if not self.ended and self._answer.cancelled.is_set():
            self._pieces.close()
        return self.ended

    def close(self) -> None:
        """End the answer now. Does nothing if it has already ended."""
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

    def by_token(self) -> TokenStream:
        """Return an iterator over the tokens, each with its id, text and log probability.

        It runs the answer as iteration does, but stops after every token, whether or not text is
        decided. It begins with the first token, even if others have been generated.
        """
        from edge.runtime.token_stream import TokenStream

        return TokenStream(self, self._answer, self._pieces, self._hold)

    @property
    def prefill(self) -> tuple[int, int]:
        """Number of prompt tokens fed so far, and number to feed. Readable from any thread.

        (0, 0) until it is known which tokens the state already holds.
        """
        return self._answer.prompt_tokens, self._answer.prompt_length

    @property
    def text(self) -> str:
        """The text emitted so far."""
        return "".join(self._answer.text)

    def logprobs(self, start: int = 0) -> tuple[TokenLogprob, ...]:
        """Return log probabilities, from `start` on, of tokens whose text has begun to appear."""
        answer = self._answer
        return tuple(takewhile(lambda entry: entry.at < answer.given, answer.logprobs[start:]))

    def call_deltas(self) -> tuple[CallDelta, ...]:
        """Return the additions to tool calls since the previous call of this method."""
        reader = self._answer.reader
        if reader is None:
            return ()
        deltas, reader.deltas = tuple(reader.deltas), []
        return deltas

    @property
    def result(self) -> GenerationResult:
        """The result. Raises InputError until the answer has ended."""
        if self._answer.result is None:
            raise InputError(
                "the answer is not finished, or ended in an error",
                field="result",
                remedy="iterate to the end, call finish(), or close() it",
            )
        return self._answer.result
