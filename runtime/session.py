"""A conversation or a running text over one state, which is reused from turn to turn."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from edge.errors import EngineError, InputError, StateError, TokenizerError
from edge.runtime import transcript
from edge.runtime.context import Context, ContextMark
from edge.runtime.generate import Answer, Generation
from edge.runtime.sampling import (
    Sampler,
    SamplingParams,
    make_params,
    new_rng,
    restore_rng,
    rng_state,
)
from edge.runtime.speculate.choose import drafting
from edge.text.template import Message
from edge.text.tokenizer import check_text

if TYPE_CHECKING:
    from edge.runtime.model import Model

MAX_PROMPT_TOKENS = 1 << 17
UNDO_LEVELS = 4


@dataclass(frozen=True)
class SessionSnapshot:
    """All of a session at one moment. Holds a copy of one state."""

    context: ContextMark
    messages: tuple[Message, ...]
    rng: Mapping[str, Any]


class Session:
    """One user of a model. Either a chat (`chat`) or a text that goes on (`generate`).

    The state always holds exactly the tokens of the transcript so far, so a turn runs only what is
    new. One thread uses a session at a time, a second one gets an EngineError; only `cancel` may
    come from anywhere.

    Attributes:
        model: what it runs on.
        max_prompt_tokens: most tokens of one prompt.
    """

    def __init__(
        self,
        model: Model,
        *,
        system: str | None = None,
        window: int = 8,
        capacity: int | None = None,
        seed: int | None = None,
        max_prompt_tokens: int = MAX_PROMPT_TOKENS,
        undo_levels: int = UNDO_LEVELS,
        draft: Model | Literal["ngram"] | None = None,
        draft_tokens: int | None = None,
    ) -> None:
        """Everything is allocated here.

        `system`: the chat's first message. `window`, `capacity`: see `Engine.new_state`. `seed`: of
        random numbers that answers without a seed of their own draw from. `undo_levels`: how many
        turns `undo` can take back; each holds a copy of one state. `draft`: a model of the same
        tokenizer, or "ngram", that proposes tokens for this one to verify; `draft_tokens` of them
        at a time, or as many as prove quickest.
        """
        self.model = model
        self.max_prompt_tokens = max_prompt_tokens
        if system is not None:
            check_text(system)
        self._opening = [] if system is None else [Message("system", system)]
        self._messages = list(self._opening)
        self._drafting = drafting(model, draft, draft_tokens, capacity)
        if self._drafting is not None:
            window = max(window, self._drafting.window)
        state = model.engine.new_state(window=window, capacity=capacity)
        self._context = Context(model.engine, state)
        self._rng = new_rng(SamplingParams(seed=seed).seed)
        self._undo: deque[SessionSnapshot] = deque(maxlen=max(1, undo_levels))
        self._lock = threading.Lock()
        self._turn: _Turn | None = None

    # -- what it is ------------------------------------------------------------------------------

    @property
    def messages(self) -> tuple[Message, ...]:
        """The transcript, the system message included."""
        return tuple(self._messages)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token the state has consumed."""
        return tuple(self._context.tokens)

    @property
    def pending(self) -> int | None:
        """The last sampled token, when the state has not consumed it yet."""
        return self._context.pending

    @property
    def state_bytes(self) -> int:
        """Memory of the state's buffers, bytes. Does not grow."""
        return self._context.state.nbytes

    @property
    def undo_levels(self) -> int:
        """How many turns `undo` can take back now."""
        return len(self._undo)

    # -- answers ---------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int] | None = None, **sampling: Any) -> Generation:
        """Go on from `prompt`, text or token ids, after whatever this session holds.

        None, or nothing, goes on from where the last answer ended; in a new session it begins with
        the model's `bos`, where it has one. `sampling` are fields of `SamplingParams` over the
        model's defaults. Nothing runs before the answer is iterated.

        Raises InputError: parameters, ids out of range, a prompt that is too long or, with nothing
        to go on from, empty; ContextFullError; InputError while another answer is unfinished.
        """
        with self._idle():
            if self._messages:
                raise InputError(
                    "this session is a chat", remedy="use chat(), or a session without messages"
                )
            given = self._encode(prompt)
            context = self._context
            pending = [] if context.pending is None else [context.pending]
            if not context.tokens and not pending:
                given = self._with_bos(given, isinstance(prompt, str) or prompt is None)
            feed = [*pending, *given]
            if not feed:
                raise InputError(
                    "is empty and there is nothing to go on from",
                    field="prompt",
                    remedy="give some text",
                )
            self._check_length(len(feed))
            context.check_room(len(context.tokens) + len(feed))
            return self._begin(_Turn(feed, None), sampling, continued=True)

    def chat(
        self, text: str | Sequence[Message | Mapping[str, str]], **sampling: Any
    ) -> Generation:
        """Answer a user's message, or the last of a whole list of messages.

        A list replaces the transcript; what it has in common with it is not run again. The answer
        joins the transcript when it ends, however it ends, unless nothing was generated.

        Raises as `generate` does, and TokenizerError: a base model has no chat template.
        """
        with self._idle():
            template = self.model.template
            if template is None:
                raise TokenizerError(
                    "this model has no chat template: it was not trained for conversations",
                    file=self.model.path,
                    remedy="use generate() to continue text",
                )
            if self._context.tokens and len(self._messages) == len(self._opening):
                raise InputError(
                    "this session is a running text", remedy="use generate(), or another session"
                )
            messages = transcript.extended(self._messages, text)
            self._check_size(messages)
            wanted = template.encode(messages)
            self._check_length(len(wanted))
            self._context.check_room(len(wanted))
            if not wanted:
                raise InputError("the conversation has no tokens", field="messages")
            return self._begin(_Turn(wanted, messages), sampling, continued=False)

    def cancel(self) -> None:
        """End the answer that is being made, within one step or chunk; from any thread."""
        turn = self._turn
        if turn is not None:
            turn.answer.cancelled.set()

    def _begin(self, turn: _Turn, sampling: Mapping[str, Any], *, continued: bool) -> Generation:
        tokenizer = self.model.tokenizer
        params = make_params(self.model.defaults, sampling)
        for token in params.logit_bias:
            tokenizer.check_id(token)
        # random numbers are copied: those of an answer that leaves no trace are not used up
        sampler = Sampler(params, restore_rng(rng_state(self._rng)))
        turn.answer = Answer(
            self, self._context, tokenizer, sampler, self._drafting, continued=continued
        )
        self._turn = turn
        return Generation(turn.answer)

    # -- prompts ---------------------------------------------------------------------------------

    def _encode(self, prompt: str | Sequence[int] | None) -> list[int]:
        tokenizer = self.model.tokenizer
        if prompt is None:
            return []
        if isinstance(prompt, str):
            check_text(prompt)
            self._check_text_size(len(prompt.encode()))
            return tokenizer.encode(prompt)
        self._check_length(len(prompt))
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise InputError(f"{token!r:.40} is no token id", field="prompt")
            tokenizer.check_id(int(token))
        return [int(token) for token in prompt]

    def _with_bos(self, tokens: list[int], text: bool) -> list[int]:
        tokenizer = self.model.tokenizer
        if tokenizer.bos is None or not text:
            return tokens
        return [tokenizer.bos, *tokens] if tokenizer.add_bos or not tokens else tokens

    def _check_size(self, messages: Sequence[Message]) -> None:
        for message in messages:
            check_text(message.content)
        self._check_text_size(sum(len(message.content.encode()) for message in messages))

    def _check_text_size(self, size: int) -> None:
        """Refuse, before it is encoded, what cannot fit whatever its tokens are."""
        self._check_length(-(-size // self.model.tokenizer.longest_piece))

    def _check_length(self, count: int) -> None:
        if count > self.max_prompt_tokens:
            raise InputError(
                f"has at least {count} tokens, at most {self.max_prompt_tokens} allowed",
                field="prompt",
                remedy="send less, or raise max_prompt_tokens",
            )

    # -- going back ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything but the system message; `undo` brings it back."""
        with self._idle():
            self._undo.append(self._snapshot())
            self._context.clear()
            self._messages = list(self._opening)

    def undo(self) -> None:
        """Take the last turn back, by copying the state from before it: nothing is run again.

        Raises StateError when there is no turn to take back.
        """
        with self._idle():
            if not self._undo:
                raise StateError(
                    "there is nothing to undo", remedy=f"{self._undo.maxlen} turns are kept"
                )
            self._restore(self._undo.pop())

    def snapshot(self) -> SessionSnapshot:
        """All of this session now, to come back to with `restore`."""
        with self._idle():
            return self._snapshot()

    def restore(self, snapshot: SessionSnapshot) -> None:
        """Back to a snapshot of a session of the same model. Raises StateError otherwise."""
        with self._idle():
            self._restore(snapshot)

    def _snapshot(self) -> SessionSnapshot:
        return SessionSnapshot(self._context.mark(), self.messages, rng_state(self._rng))

    def _restore(self, snapshot: SessionSnapshot) -> None:
        self._context.restore(snapshot.context)
        self._messages = list(snapshot.messages)
        self._rng = restore_rng(snapshot.rng)

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write state, transcript and random numbers to a file, whole or not at all.

        Raises StateError when it cannot be written.
        """
        with self._idle():
            extra = transcript.to_json(
                self._messages, self._context.tokens, self._context.pending, rng_state(self._rng)
            )
            self._context.state.save(path, extra)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Take up a saved session as if it had never been left; `undo` takes that back.

        Returns how many tokens need not be run again. Raises StateError: damaged, or of another
        model, quantization, tokenizer or version; this session is then unchanged.
        """
        with self._idle():
            before = self._snapshot()
            extra = self._context.state.load(path)
            try:
                saved = transcript.from_json(extra, self.model.tokenizer, path)
                if len(saved.tokens) != self._context.state.position:
                    raise StateError("transcript and state disagree", file=path)
                rng = restore_rng(saved.rng)
            except StateError:
                self._restore(before)
                raise
            self._undo.append(before)
            self._context.tokens[:] = saved.tokens
            self._context.pending = saved.pending
            self._messages, self._rng = list(saved.messages), rng
            return len(saved.tokens)

    # -- what an answer asks ---------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """The session, for this thread. Raises EngineError while it is in use."""
        if not self._lock.acquire(blocking=False):
            raise EngineError(
                "the session is in use by another thread, or by the answer being made",
                remedy="use one session per thread",
            )
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _idle(self) -> Iterator[None]:
        with self.held():
            if self._turn is not None:
                raise InputError(
                    "an answer is being made", remedy="finish it, or close() it, first"
                )
            yield

    def opened(self) -> tuple[Sequence[int], int]:
        """See `Owner.opened`."""
        turn = self._turn
        assert turn is not None
        turn.before = self._snapshot()
        if turn.messages is None:
            return turn.tokens, len(self._context.tokens)
        reused = self._context.align(turn.tokens)
        return turn.tokens[reused:], reused

    def closed(self, answer: Answer, kept: int | None) -> None:
        """See `Owner.closed`."""
        turn, self._turn = self._turn, None
        assert turn is not None
        if kept is None:
            if turn.before is not None:
                self._restore(turn.before)
            return
        assert turn.before is not None
        self._undo.append(turn.before)
        self._rng = answer.sampler.rng
        kept = self._drop_last(len(answer.tokens), kept)
        if turn.messages is not None:
            ends = self.model.tokenizer.eos
            said = tuple(token for token in answer.tokens[:kept] if token not in ends)
            text = "".join(answer.text)
            self._messages = [*turn.messages, Message("assistant", text, said)]

    def _drop_last(self, made: int, kept: int) -> int:
        """Forget tokens after the first `kept`, if the state reaches that far; how many stay."""
        context = self._context
        excess = made - max(kept, 1)
        if excess > context.state.reach:
            return made
        if excess:
            last = context.tokens[-excess]
            context.rewind(excess)
            context.pending = last
        if not kept:
            context.pending = None
        return kept


@dataclass
class _Turn:
    """A turn that has begun: tokens of the prompt, and of a chat the transcript it answers."""

    tokens: list[int]
    messages: list[Message] | None
    before: SessionSnapshot | None = None

    def __post_init__(self) -> None:
        self.answer: Answer
