"""One answer: prefill, then sample and step until something ends it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFullError, EdgeError, InputError
from edge.runtime.engine import Engine
from edge.runtime.parameters import SamplingParams
from edge.runtime.result import FinishReason, GenerationResult, Timings, TokenLogprob
from edge.runtime.sampling import Sampler, logprob_of
from edge.runtime.state import State
from edge.runtime.state_memory import Snapshot
from edge.text.stream import StopMatcher, StreamDecoder
from edge.text.tokenizer import Tokenizer
from edge.text.tools import CallDelta

if TYPE_CHECKING:
    from edge.runtime.constrain.tools import ToolUse
    from edge.runtime.speculate.decode import Drafting, Speculation

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class ContextMark:
    """A place to come back to: one state, and the tokens that led to it."""

    state: Snapshot
    tokens: tuple[int, ...]
    pending: int | None
    forgotten: int = 0
    gap: int = 0


class Context:
    """One sequence of an engine: a state together with the tokens it has consumed.

    Attributes:
        tokens: ids consumed by the state, but for those that are forgotten.
        pending: the last sampled token when it has not been fed yet.
        forgotten: how many consumed tokens are no longer kept.
        gap: they were all before this index of `tokens`, which cannot be gone behind.
    """

    def __init__(self, engine: Engine, state: State) -> None:
        self.engine = engine
        self.state = state
        self.capacity = state.capacity
        self.tokens: list[int] = []
        self.pending: int | None = None
        self.forgotten = self.gap = 0

    @property
    def full(self) -> bool:
        """Whether not even one more token can be fed."""
        return self.capacity is not None and len(self.tokens) >= self.capacity

    def check_room(self, count: int) -> None:
        """Raise ContextFullError unless the KV caches could hold `count` tokens in all."""
        if self.capacity is not None and count > self.capacity:
            raise ContextFullError(
                f"{count} tokens do not fit into a context of {self.capacity}",
                field="prompt",
                remedy="start a new session or send less; models without attention have no limit",
            )

    # -- running ---------------------------------------------------------------------------------

    def feed(self, tokens: Sequence[int], halted: Callable[[], object]) -> Logits | None:
        """Consume tokens in chunks; logits [V] after the last, valid until the next run.

        None when `halted()` said so before all chunks were through; what was fed stays fed.
        """
        logits: Logits | None = None
        for start in range(0, len(tokens), self.engine.chunk):
            if halted():
                return None
            chunk = tokens[start : start + self.engine.chunk]
            logits = self._run(chunk, commit=len(chunk) > 1)
        return logits

    def step(self, token: int) -> Logits:
        """Consume one token; logits [V], valid until the next run."""
        return self._run((token,), commit=False)

    def step_greedily(self, token: int, limit: int) -> int | Logits:
        """Consume one token; the likeliest id after it where the engine finds it itself and it is
        below `limit`, else the logits [V].
        """
        if not self.engine.finds_argmax:
            return self.step(token)
        best = int(self.engine.run_greedy(np.asarray([[token]], np.int64), self.state)[0])
        if best >= limit:  # padding of the vocabulary, which no model was taught to say
            self.state.rewind(1)
            return self.step(token)
        self.tokens.append(token)
        self.pending = None
        return best

    def advance(self, tokens: Sequence[int]) -> Logits:
        """Consume tokens, so that they can be taken back where the window allows; logits [V]."""
        if len(tokens) <= self.state.window:
            return self._run(tokens, commit=False)
        logits = self.feed(tokens, lambda: False)
        assert logits is not None
        return logits

    def verify(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Logits:
        """Run at most a window of tokens; logits [T, V] after each, valid until the next run.

        Without `parents` they are consumed, and all of them can be taken back. A tree is consumed
        by `keep` alone, which has to come next.
        """
        run = self.engine.run
        logits = run(np.asarray([tokens], np.int64), self.state, parents=parents, rows="all")
        if parents is None:
            self.tokens.extend(tokens)
            self.pending = None
        rows: Logits = logits[0]
        return rows

    def keep(self, node: int, tokens: Sequence[int]) -> None:
        """Consume the path of the tree that ends at `node`, which is `tokens`."""
        self.state.select(node)
        self.tokens.extend(tokens)
        self.pending = None

    def _run(self, tokens: Sequence[int], *, commit: bool) -> Logits:
        logits = self.engine.run(np.asarray([tokens], np.int64), self.state, commit=commit)
        self.tokens.extend(tokens)
        self.pending = None
        row: Logits = logits[0, -1]
        return row

    # -- going back ------------------------------------------------------------------------------

    def align(self, wanted: Sequence[int], known: int = 0) -> int:
        """Go back so that what was consumed begins what is wanted, leaving at least one token to
        feed. That is the first `known` tokens consumed, of which nothing is asked, and `wanted`.

        Returns how many tokens in all need not be run again: all that agree, when the state can be
        rewound that far, and no interrupt left it with others than `tokens` says, else none.
        """
        held = self.tokens[known:]
        agree = known + common_prefix(held, wanted, min(len(held), len(wanted) - 1))
        excess = len(self.tokens) - agree
        self.pending = None
        sound = len(self.tokens) + self.forgotten == self.state.position
        if not sound or excess > self.state.reach or agree < self.gap:
            self.clear()
            return 0
        self.rewind(excess)
        return agree

    def rewind(self, count: int) -> None:
        """Take back the last `count` tokens. StateError beyond the state's reach."""
        if count:
            self.state.rewind(count)
            del self.tokens[-count:]

    def clear(self) -> None:
        """Back to before any token."""
        self.state.clear()
        self.tokens.clear()
        self.pending, self.forgotten, self.gap = None, 0, 0

    def forget(self, start: int, count: int) -> None:
        """Keep no longer what `count` consumed tokens from `start` on were; the state has them."""
        if count:
            del self.tokens[start : start + count]
            self.forgotten += count
            self.gap = max(start, self.gap - count)

    def mark(self) -> ContextMark:
        """Where this is now; costs a copy of one state."""
        return ContextMark(
            self.state.snapshot(), tuple(self.tokens), self.pending, self.forgotten, self.gap
        )

    def restore(self, mark: ContextMark) -> None:
        """Back to a mark, by copying its state in."""
        self.state.restore(mark.state)
        self.tokens[:] = mark.tokens
        self.pending, self.forgotten, self.gap = mark.pending, mark.forgotten, mark.gap


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int | None = None) -> int:
    """How many of the first tokens agree, of at most `limit`."""
    low, high = 0, min(len(a), len(b)) if limit is None else limit
    # comparing slices is a hundred times quicker than comparing tokens, and nearly all agree
    while low < high:
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


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
        """Consume a token and sample the next one, without looking at any logits where the engine
        finds the likeliest itself.
        """
        if self._greedy:
            found = self.context.step_greedily(token, self.vocab_size)
            if isinstance(found, int):
                return found
        else:
            found = self.context.step(token)
        return self.choose(found)

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
        continued: it continues the prompt's text, so its first space counts.
        prompt_tokens, reused_tokens: see `GenerationResult`; the first grows while a prompt is fed.
        prompt_length: how many tokens are to be fed.
        logprobs: of the tokens, where they are asked for.
        given: characters given out, those of calls included.
        reader: finds calls of tools in the text, where there are tools.
        kept: how many of the tokens the text is made of: those of a stop string are not among them.
        result: how it ended, once it has and was no failure.
    """

    def __init__(
        self, params: SamplingParams, *, continued: bool, tools: ToolUse | None = None
    ) -> None:
        self.params, self.continued = params, continued
        self.reader = tools.reader() if tools else None
        self.spelled = tools.spelled if tools else {}
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
        """Since it was asked for."""
        return time.monotonic() - self._began

    def halted(self) -> FinishReason | None:
        """Why it has to end before the next run, if it has to."""
        if self.cancelled.is_set():
            return "cancelled"
        deadline = self.params.deadline_s
        if deadline is not None and self.seconds() >= deadline:
            return "deadline"
        return None

    def give(self, text: str, *, last: bool = False) -> str:
        """What is to be shown of decided text: not what calls a tool."""
        self.given += len(text)
        if self.reader is not None:
            text = self.reader.feed(text)
            text += self.reader.finish() if last else ""
        if text:
            self.text.append(text)
        return text

    def end(self, reason: FinishReason, tokenizer: Tokenizer, *, stopped: bool) -> None:
        """Record the result. `stopped`: by a stop string."""
        count = len(self.tokens)
        while stopped and count and len(self._decoded(tokenizer, count)) > self.given:
            count -= 1
        self.kept = count
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

    def _decoded(self, tokenizer: Tokenizer, count: int) -> str:
        return tokenizer.decode(self.tokens[:count], continued=self.continued)


def generate(
    answer: Answer,
    context: Context,
    sampler: Sampler,
    tokenizer: Tokenizer,
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
    params, ended = answer.params, None
    decoder = StreamDecoder(tokenizer, continued=answer.continued, spelled=answer.spelled)
    decoded = 0
    stops = StopMatcher(params.stop)
    try:
        yield ""
        logits = prefill()
        answer.prompt_s = answer.seconds()
        if logits is None:
            ended = answer.halted()
        else:
            steps = Stepper(
                context, sampler, tokenizer.vocab_size,
                special=tokenizer.special_ids, unassigned=tokenizer.unassigned,
            )  # fmt: skip
            decoding = steps if drafting is None else drafting.begin(steps, answer)
            with closing(decoding.tokens(logits)) as tokens:
                for token in tokens:
                    answer.tokens.append(token)
                    answer.token_s.append(answer.seconds())
                    if steps.noted:
                        answer.logprobs.append(replace(steps.noted.popleft(), at=decoded))
                    if token in tokenizer.eos:
                        ended = "stop"
                        break
                    text = decoder.feed(token)
                    decoded += len(text)
                    if piece := stops.feed(text):
                        yield answer.give(piece)
                    if ended := _ended(answer, stops, context, sampler):
                        break
            if tail := answer.give(stops.feed(decoder.finish()) + stops.finish(), last=True):
                yield tail
    except GeneratorExit:  # closed, or dropped half-way: the answer ends here
        ended = "cancelled"
        answer.give(stops.feed(decoder.finish()) + stops.finish(), last=True)
    except BaseException:
        finish(False)
        raise
    answer.end(ended or "cancelled", tokenizer, stopped=stops.stopped)
    finish(True)


def _ended(
    answer: Answer, stops: StopMatcher, context: Context, sampler: Sampler
) -> FinishReason | None:
    """Why the answer ends after this token, if it does."""
    if stops.stopped or (sampler.mask is not None and sampler.mask.complete):
        return "stop"
    if len(answer.tokens) >= answer.params.max_tokens:
        return "length"
    return answer.halted() or ("context" if context.full else None)


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
