"""Sessions: a conversation or a running text over one state, reused from turn to turn."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edge import log
from edge.errors import EngineError, InputError, StateError, TokenizerError
from edge.runtime import prompts, transcript
from edge.runtime.context import Consumed, Context, Logits
from edge.runtime.generate import Answer, Generation, generate
from edge.runtime.parameters import Sampling, make_params
from edge.runtime.prompts import PromptReader, Turn
from edge.runtime.request import Hold
from edge.runtime.sampling import Sampler, restore_rng, rng_state
from edge.runtime.session_options import SessionOptions, check_options
from edge.runtime.transcript import Conversation, SavedSession, SessionRecord
from edge.runtime.transcript import SessionSnapshot as SessionSnapshot
from edge.text.template import Message
from edge.text.tokenizer import check_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edge.runtime.constrain.mask import Mask
    from edge.runtime.model import Model


class Session:
    """One user of a model. Either a chat (`chat`) or a running text (`generate`).

    The state always holds exactly the tokens of the transcript, so a turn runs only new tokens.
    Without attention, a conversation can go on forever: the state has consumed all of it, but only
    the last part of a long one is kept as text and tokens. One thread uses a session at a time; a
    second one gets an EngineError, except from `cancel`. An interrupt at any moment leaves the
    session as it was before the method call or as it is after it.

    Attributes:
        model: the model that the session runs on.
        drafting: proposes tokens to verify and decides when; None without a drafter.
    """

    def __init__(self, model: Model, **options: Unpack[SessionOptions]) -> None:
        """Allocate all memory of the session.

        Raises InputError listing every unknown option and every value out of range; EngineError or
        StateError if memory runs out.
        """
        checked = check_options(model, options)
        self.model = model
        self.drafting = checked.drafting
        self._reader = PromptReader(model.tokenizer, checked.max_prompt_tokens, model.template)
        self._initial = Conversation(
            () if checked.system is None else (Message("system", checked.system),)
        )
        self._record = SessionRecord(self._initial, rng_state(checked.rng))
        self._open_context: Context | None = Context(
            model.engine, model.engine.new_state(window=checked.window, capacity=checked.capacity)
        )
        self._max_undo = max(1, checked.undo_levels)
        self._hold = Hold(
            "the session is in use by another thread, or by the answer in progress",
            "use one session per thread",
        )
        self._current_answer: Callable[[], Generation | None] = lambda: None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the answer in progress and free the state's memory; `messages` remain.

        Raises EngineError while another thread uses the session.
        """
        self.cancel()
        with self._hold:
            record = self._record
            self._open_context, self._current_answer = None, lambda: None
            self._record = SessionRecord(record.conversation, record.rng)

    @property
    def _context(self) -> Context:
        if self._open_context is None:
            raise _closed()
        return self._open_context

    def __repr__(self) -> str:
        return f"<Session of {self.model.path.name}: {len(self.messages)} messages>"

    @property
    def messages(self) -> tuple[Message, ...]:
        """The transcript with the system message, as far as kept: at least a million characters."""
        return self._record.conversation.messages

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that the state has consumed, as far as they are kept.

        A long conversation drops those after the system message, a long running text the first
        ones.
        """
        return tuple(self._context_of_record().tokens)

    @property
    def position(self) -> int:
        """Number of tokens that the state has consumed."""
        return self._context_of_record().position

    @property
    def pending(self) -> int | None:
        """The last sampled token, if the state has not consumed it yet."""
        return self._context_of_record().pending

    @property
    def state_bytes(self) -> int:
        """Bytes of the state's buffers. Constant over the session's life."""
        return self._context.state.nbytes

    @property
    def constant_bytes(self) -> int:
        """The part of `state_bytes` that does not depend on the context.

        This is everything except the KV caches of layers with full attention.
        """
        state = self._context.state
        return state.nbytes - state.layout.growing_bytes

    @property
    def capacity(self) -> int | None:
        """Number of tokens the KV caches hold; None without attention."""
        return self._context.capacity

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a copy of the state now, as `undo`, `regenerate` and `snapshot` keep it."""
        state = self._context.state
        rows = state.layout.cache_shapes(state.position)
        return state.layout.slot_bytes + sum(
            state.layout.bytes_of(name, shape) for name, shape in rows.items()
        )

    @property
    def busy(self) -> bool:
        """Whether an answer is in progress."""
        self._hold.tidy()  # end the answer of an interrupted call, which has no other owner
        generation = self._current_answer()
        return generation is not None and not generation.ended

    @property
    def undo_levels(self) -> int:
        """Number of turns that `undo` can take back now."""
        return len(self._record.undo)

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        on_progress: log.Progress | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Continue with `prompt` after what this session holds. Nothing runs before iteration.

        Args:
            prompt: text or token ids. None or an empty prompt continues where the last answer
                ended; in a new session it starts with the model's `bos`, if there is one.
            on_progress: called as `on_progress("prefill", tokens, of)` in the iterating thread,
                before the prompt is read, between its chunks and after the last one.
            sampling: see `SamplingParams`; None or absent means the model's default.

        Raises InputError for invalid parameters, ids out of range, a prompt that is too long, an
        empty prompt with nothing to continue from, and while another answer is unfinished; and
        ContextFullError.
        """
        with self._hold:
            if self._require_idle().conversation.messages:
                raise InputError(
                    "this session is a chat", remedy="use chat(), or a session without messages"
                )
            tokens = self._reader.encode(prompt)
            context = self._context
            pending = [] if context.pending is None else [context.pending]
            if not context.tokens and not pending:
                tokens = self._reader.with_bos(tokens, isinstance(prompt, str) or prompt is None)
            feed = [*pending, *tokens]
            if not feed:
                raise InputError(
                    "empty, and there is nothing to continue from",
                    field="prompt",
                    remedy="give some text",
                )
            self._reader.check_length(len(feed))
            context.check_room(len(context.tokens) + len(feed))
            return self._begin(Turn(feed, None), sampling, on_progress)

    def chat(
        self,
        text: str | Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        on_progress: log.Progress | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Answer a user's message, or the last message of a list.

        A list replaces the transcript; a common prefix is not run again. The answer joins the
        transcript when it ends, for whatever reason, unless nothing was generated.

        Args:
            text: the user's message, or a list of messages.
            tools: functions that the answer may call, as the OpenAI API declares them. They apply
                to one answer: pass them again with the next message, or the whole prompt is read
                again. Calls are in `result.tool_calls`; a message with the role `tool` gives the
                result of one.
            tool_choice: "auto", "none", "required" or the name of a tool.
            parallel_tool_calls: whether the answer may contain several calls.
            on_progress, sampling: see `generate`.

        Raises as `generate` does, and TokenizerError for a base model, which has no chat template.
        """
        with self._hold:
            record, template = self._require_idle(), self.model.template
            if template is None:
                raise TokenizerError(
                    "this model has no chat template: it was not trained for conversations",
                    file=self.model.path,
                    remedy="use generate() to continue text",
                )
            if self._context.tokens and record.conversation.unanswered:
                raise InputError(
                    "this session is a running text", remedy="use generate(), or another session"
                )
            conversation = record.conversation.asked(text)
            anew = not conversation.continues(record.conversation)
            self._reader.check_messages(conversation.shown if anew else conversation.messages[-1:])
            tools_used = None
            if tools or tool_choice != "auto":
                from edge.runtime.constrain.tools import tool_use

                tokenizer = self.model.tokenizer
                tools_used = tool_use(tools, tool_choice, parallel_tool_calls, template, tokenizer)
            turn = self._reader.turn(conversation, self._context, anew=anew, tools=tools_used)
            self._context.check_room(len(turn.tokens))
            if not turn.tokens:
                raise InputError("the conversation has no tokens", field="messages")
            return self._begin(turn, sampling, on_progress)

    def regenerate(self, **sampling: Unpack[Sampling]) -> Generation:
        """Answer the last turn again, from the state after its prompt.

        The previous answer is replaced unless this one generates nothing. After `undo`, `restore`
        or `load` the prompt of a chat is read again. Raises StateError if there is no last turn.
        """
        with self._hold:
            last = self._require_idle().last or self._reader.last_said(self._record.conversation)
            if last is None:
                raise StateError("there is no answer to regenerate", remedy="ask something first")
            return self._begin(last, sampling, again=True)

    def cancel(self) -> None:
        """End the answer in progress within one step or chunk. May be called from any thread."""
        generation = self._current_answer()
        if generation is not None:
            generation.cancel()

    def _begin(
        self,
        turn: Turn,
        sampling: Mapping[str, Any],
        on_progress: log.Progress | None = None,
        *,
        again: bool = False,
    ) -> Generation:
        """Start the answer to a turn. `again`: it replaces the turn's previous answer."""
        tokenizer = self.model.tokenizer
        tools = turn.tools
        options = tools.sampling(sampling, self.model.defaults) if tools else sampling
        params = make_params(self.model.defaults, options)
        for token in params.logit_bias:
            tokenizer.check_id(token, "logit_bias")
        record = self._record
        continued = turn.conversation is None
        mask: Mask | None = None
        if params.constraint is not None:
            # imported late: only answers with a grammar need it
            from edge.runtime.constrain.mask import open_mask

            mask = open_mask(tokenizer, params.constraint, continued=continued)
        # copy the generator, so that an answer that is discarded consumes no random numbers
        sampler = Sampler(params, restore_rng(record.rng), mask)
        drafting = self.drafting
        if drafting is None and mask is not None:
            # imported late: only answers with drafts need it
            from edge.runtime.speculate.grammar import GRAMMAR_ALONE as drafting
        answer = Answer(params, tokenizer, continued=continued, tools=tools)
        before: SessionSnapshot | None = None

        def prefill() -> Logits | None:
            nonlocal before
            before = self._snapshot()
            self._record = replace(record, mark=before.context)
            return turn.read_into(self._context, answer, on_progress)

        def finish(succeeded: bool) -> None:
            _log_answer(answer)
            # never started, or the session is closed
            if before is None or self._open_context is None:
                return
            if not succeeded or not answer.tokens:
                self._roll_back()
                return
            conversation = self._with_answer(turn, answer)
            undo = record.undo if again else self._undo_history(before)
            self._record = SessionRecord(conversation, rng_state(sampler.rng), undo, turn)

        pieces = generate(
            answer, self._context, sampler, drafting, prefill=prefill, finish=finish
        )  # fmt: skip
        generation = Generation(answer, pieces, self._hold)
        # a weak reference, because dropping an answer ends it
        self._current_answer = weakref.ref(generation)
        return generation

    def _with_answer(self, turn: Turn, answer: Answer) -> Conversation:
        """Return the transcript with the answer, after rewinding tokens that are not part of it."""
        kept = self._context.drop(len(answer.tokens), answer.kept)
        if turn.conversation is None:
            context = self._context
            if context.capacity is None and len(context.tokens) > 2 * prompts.SHOWN:
                context.forget(0, len(context.tokens) - prompts.SHOWN)
            return self._record.conversation
        eos = self.model.tokenizer.eos
        tokens = tuple(token for token in answer.tokens[:kept] if token not in eos)
        calls = answer.result.tool_calls if answer.result else ()
        return turn.conversation.answered(Message("assistant", "".join(answer.text), tokens, calls))

    def reset(self, system: str | None = None) -> None:
        """Forget everything except the system message; `undo` restores it.

        `system`: replacement for the system message; "" removes it.
        """
        if system is not None:
            check_text(system)
            self._initial = Conversation((Message("system", system),) if system else ())
        with self._hold:
            record, before = self._require_idle(), self._snapshot()
            self._record = replace(record, mark=before.context)
            self._context.clear()
            self._record = SessionRecord(self._initial, record.rng, self._undo_history(before))

    def undo(self) -> None:
        """Take back the last turn by restoring the state before it; no token is run again.

        Raises StateError if no turn can be taken back.
        """
        with self._hold:
            undo = self._require_idle().undo
            if not undo:
                raise StateError("nothing to undo", remedy=f"turns kept: {self._max_undo}")
            self._adopt(undo[-1], undo[:-1])

    def snapshot(self) -> SessionSnapshot:
        """Return a snapshot of the whole session, for `restore`."""
        with self._hold:
            self._require_idle()
            return self._snapshot()

    def restore(self, snapshot: SessionSnapshot, *, undoable: bool = False) -> None:
        """Return to a snapshot of a session of the same model. Raises StateError otherwise.

        `undoable`: whether `undo` can take this back like a turn.
        """
        if not isinstance(snapshot, SessionSnapshot):
            raise StateError(
                f"is not a snapshot, but {type(snapshot).__name__}", field="snapshot",
                remedy="give what snapshot() returned; load() reads a file",
            )  # fmt: skip
        with self._hold:
            record = self._require_idle()
            self._context.state.check(snapshot.context.state)
            self._adopt(snapshot, self._undo_history(self._snapshot()) if undoable else record.undo)

    def _adopt(self, snapshot: SessionSnapshot, undo: tuple[SessionSnapshot, ...]) -> None:
        """Adopt a snapshot of this model."""
        self._record = SessionRecord(
            snapshot.conversation, snapshot.rng, undo, mark=snapshot.context
        )
        self._roll_back()

    def _snapshot(self) -> SessionSnapshot:
        record = self._record
        return SessionSnapshot(self._context.mark(), record.conversation, record.rng)

    def _undo_history(self, before: SessionSnapshot) -> tuple[SessionSnapshot, ...]:
        """Return the undo history after an action that started from `before`."""
        return (*self._record.undo, before)[-self._max_undo :]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write state, transcript and random numbers to a file atomically.

        Raises StateError if it cannot be written.
        """
        with self._hold:
            record, context = self._require_idle(), self._context
            saved = SavedSession(record.conversation, context.consumed, record.rng)
            context.state.save(path, transcript.to_json(saved, self.model.path.name))

    def load(self, path: str | os.PathLike[str], *, replay: bool = False) -> int:
        """Resume a saved session; `undo` takes this back.

        `replay`: if the state of a saved chat cannot be used here, take its messages alone. The
        next answer then reads the prompt again, and 0 is returned.

        Returns the number of tokens that need not be run again. Raises StateError for a file that
        is damaged or from another model, quantization, tokenizer or version; this session is then
        unchanged.
        """
        with self._hold:
            record, before = self._require_idle(), self._snapshot()
            self._record = replace(record, mark=before.context)
            try:
                saved = transcript.load_into(self._context, path, self.model.tokenizer)
            except StateError as problem:
                replay = replay and self.model.template is not None
                conversation = transcript.read_conversation(path) if replay else None
                if conversation is None:
                    self._roll_back()
                    raise
                log.info("edge.session", "%s: read again, %s", path, problem.message)
                self._context.clear()
                saved = SavedSession(conversation, Consumed(), record.rng)
            self._record = SessionRecord(saved.conversation, saved.rng, self._undo_history(before))
            log.info("edge.session", "resumed %s: %d tokens", path, self._context.position)
            return self._context.position

    def _require_idle(self) -> SessionRecord:
        """Return the session's record, ending an answer that was cancelled but not iterated since.

        Raises InputError while another answer is in progress, and if the session is closed.
        """
        if self._open_context is None:
            raise _closed()
        generation = self._current_answer()
        if generation is not None and not generation.stopped():
            raise InputError(
                "an answer is in progress", remedy="finish it, close() it, or cancel() first"
            )
        return self._roll_back()

    def _roll_back(self) -> SessionRecord:
        """Return the session's record, after rolling back an interrupted action."""
        record = self._record
        if record.mark is not None:
            self._context.restore(record.mark)
            record = self._record = replace(record, mark=None)
        return record

    def _context_of_record(self) -> Context:
        """Return the context, rolled back unless an action is in progress."""
        if self._record.mark is not None and not self.busy:
            with suppress(EngineError), self._hold:
                self._roll_back()
        return self._context


def _log_answer(answer: Answer) -> None:
    if (result := answer.result) is None:
        log.info("edge.answer", "failed after %d tokens", len(answer.tokens))
        return
    log.info(
        "edge.answer", "%s: %d tokens fed, %d reused, %d made in %.3f s",
        result.finish_reason, result.prompt_tokens, result.reused_tokens, len(result.tokens),
        result.timings.total_s,
    )  # fmt: skip


def _closed() -> InputError:
    return InputError("the session is closed", remedy="open another with model.session()")
