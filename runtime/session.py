"""A conversation or a running text over one state, which is reused from turn to turn."""

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
from edge.runtime.transcript import Conversation, SavedSession, Settled
from edge.runtime.transcript import SessionSnapshot as SessionSnapshot
from edge.text.template import Message
from edge.text.tokenizer import check_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edge.runtime.constrain.mask import Mask
    from edge.runtime.model import Model


class Session:
    """One user of a model. Either a chat (`chat`) or a running text (`generate`).

    The state always holds exactly the tokens of the transcript so far, so a turn runs only what is
    new. Without attention a conversation has no end: of a long one only the last part is kept as
    text and tokens, all of it is in the state. One thread uses a session at a time, a second one
    gets an EngineError; only `cancel` may come from anywhere. An interrupt at any moment
    leaves the session as it was before the verb or as it is after it.

    Attributes:
        model: what it runs on.
        drafting: who proposes tokens to verify, and when; None without a drafter.
    """

    def __init__(self, model: Model, **options: Unpack[SessionOptions]) -> None:
        """Everything is allocated here.

        Raises InputError naming every unknown option and every value that is out of range;
        EngineError, StateError without memory.
        """
        asked = check_options(model, options)
        self.model = model
        self.drafting = asked.drafting
        self._reader = PromptReader(model.tokenizer, asked.max_prompt_tokens, model.template)
        self._opening = Conversation(
            () if asked.system is None else (Message("system", asked.system),)
        )
        self._settled = Settled(self._opening, rng_state(asked.rng))
        self._open: Context | None = Context(
            model.engine, model.engine.new_state(window=asked.window, capacity=asked.capacity)
        )
        self._levels = max(1, asked.undo_levels)
        self._hold = Hold(
            "the session is in use by another thread, or by the answer being made",
            "use one session per thread",
        )
        self._making: Callable[[], Generation | None] = lambda: None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the answer being made and free the state's memory; `messages` stay.

        Raises EngineError while another thread uses the session.
        """
        self.cancel()
        with self._hold:
            now = self._settled
            self._open, self._making = None, lambda: None
            self._settled = Settled(now.conversation, now.rng)

    @property
    def _context(self) -> Context:
        if self._open is None:
            raise _closed()
        return self._open

    # -- what it is ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<Session of {self.model.path.name}: {len(self.messages)} messages>"

    @property
    def messages(self) -> tuple[Message, ...]:
        """The transcript, the system message included, as far as it is kept: a million characters
        at least.
        """
        return self._settled.conversation.messages

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the state has consumed, but for the tokens of a long conversation that are not kept:
        those after the system message, or the first ones of a running text.
        """
        return tuple(self._calm().tokens)

    @property
    def position(self) -> int:
        """How many tokens the state has consumed."""
        return self._calm().position

    @property
    def pending(self) -> int | None:
        """The last sampled token, when the state has not consumed it yet."""
        return self._calm().pending

    @property
    def state_bytes(self) -> int:
        """Memory of the state's buffers, bytes. Does not grow."""
        return self._context.state.nbytes

    @property
    def constant_bytes(self) -> int:
        """The part of `state_bytes` that does not depend on the context: all but the KV caches of
        layers that look back on all of it.
        """
        state = self._context.state
        return state.nbytes - state.layout.growing_bytes

    @property
    def capacity(self) -> int | None:
        """Tokens the KV caches hold; None without attention, where nothing grows."""
        return self._context.capacity

    @property
    def snapshot_bytes(self) -> int:
        """What a copy of the state takes now, bytes: of `undo`, `regenerate` and `snapshot`."""
        state = self._context.state
        rows = state.layout.cache_shapes(state.position)
        return state.layout.slot_bytes + sum(
            state.layout.bytes_of(name, shape) for name, shape in rows.items()
        )

    @property
    def busy(self) -> bool:
        """Whether an answer is being made."""
        self._hold.tidy()  # ends the answer of an interrupted call, which has no other owner
        generation = self._making()
        return generation is not None and not generation.ended

    @property
    def undo_levels(self) -> int:
        """How many turns `undo` can take back now."""
        return len(self._settled.undo)

    # -- answers ---------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        on_progress: log.Progress | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Continue with `prompt`, text or token ids, after whatever this session holds.

        None, or nothing, continues where the last answer ended; in a new session it begins with
        the model's `bos`, where it has one. `sampling`: see `SamplingParams`; what is not given, or
        None, is as the model's defaults say. Nothing runs before the answer is iterated.
        `on_progress("prefill", tokens, of)` is called in the thread that iterates, before the
        prompt is read, between its chunks and after the last one.

        Raises InputError: parameters, ids out of range, a prompt that is too long or, with nothing
        to continue from, empty; ContextFullError; InputError while another answer is unfinished.
        """
        with self._hold:
            if self._at_rest().conversation.messages:
                raise InputError(
                    "this session is a chat", remedy="use chat(), or a session without messages"
                )
            given = self._reader.encode(prompt)
            context = self._context
            pending = [] if context.pending is None else [context.pending]
            if not context.tokens and not pending:
                given = self._reader.with_bos(given, isinstance(prompt, str) or prompt is None)
            feed = [*pending, *given]
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
        """Answer a user's message, or the last of a whole list of messages.

        A list replaces the transcript; what it has in common with it is not run again. The answer
        joins the transcript when it ends, however it ends, unless nothing was generated.

        `tools`: functions that the answer may call, as the OpenAI API declares them; `tool_choice`:
        "auto", "none", "required" or a name. The calls are `result.tool_calls`; a message with the
        role `tool` tells what came of one. Tools hold for one answer: give them again with the next
        message, or all is read again. `on_progress`: as of `generate`.

        Raises as `generate` does, and TokenizerError: a base model has no chat template.
        """
        with self._hold:
            now, template = self._at_rest(), self.model.template
            if template is None:
                raise TokenizerError(
                    "this model has no chat template: it was not trained for conversations",
                    file=self.model.path,
                    remedy="use generate() to continue text",
                )
            if self._context.tokens and now.conversation.unanswered:
                raise InputError(
                    "this session is a running text", remedy="use generate(), or another session"
                )
            conversation = now.conversation.asked(text)
            anew = not conversation.continues(now.conversation)
            self._reader.check_messages(conversation.shown if anew else conversation.messages[-1:])
            use = None
            if tools or tool_choice != "auto":
                from edge.runtime.constrain.tools import tool_use

                tokenizer = self.model.tokenizer
                use = tool_use(tools, tool_choice, parallel_tool_calls, template, tokenizer)
            turn = self._reader.turn(conversation, self._context, anew=anew, tools=use)
            self._context.check_room(len(turn.tokens))
            if not turn.tokens:
                raise InputError("the conversation has no tokens", field="messages")
            return self._begin(turn, sampling, on_progress)

    def regenerate(self, **sampling: Unpack[Sampling]) -> Generation:
        """Answer the last turn again, from the state in which its prompt had been read.

        The answer before is forgotten when this one leaves a trace. After `undo`, `restore` and
        `load` the prompt of a chat is read again. Raises StateError where there is no last turn.
        """
        with self._hold:
            last = self._at_rest().last or self._reader.last_said(self._settled.conversation)
            if last is None:
                raise StateError("no answer to make again", remedy="say something first")
            return self._begin(last, sampling, again=True)

    def cancel(self) -> None:
        """End the answer that is being made, within one step or chunk; from any thread."""
        generation = self._making()
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
        """The answer to a turn; `again`: another one, which takes the place of the first."""
        tokenizer = self.model.tokenizer
        use = turn.tools
        given = use.sampling(sampling, self.model.defaults) if use else sampling
        params = make_params(self.model.defaults, given)
        for token in params.logit_bias:
            tokenizer.check_id(token)
        now = self._settled
        continued = turn.conversation is None
        mask: Mask | None = None
        if params.constraint is not None:
            # only answers with a grammar load it
            from edge.runtime.constrain.mask import open_mask

            mask = open_mask(tokenizer, params.constraint, continued=continued)
        # random numbers are copied: those of an answer that leaves no trace are not used up
        sampler = Sampler(params, restore_rng(now.rng), mask)
        drafting = self.drafting
        if drafting is None and mask is not None:
            # speculation is imported where something may be drafted only
            from edge.runtime.speculate.grammar import GRAMMAR_ALONE as drafting
        answer = Answer(params, tokenizer, continued=continued, tools=use)
        before: SessionSnapshot | None = None

        def prefill() -> Logits | None:
            nonlocal before
            before = self._snapshot()
            self._settled = replace(now, mark=before.context)
            return turn.read_into(self._context, answer, on_progress)

        def finish(succeeded: bool) -> None:
            _log(answer)
            if before is None or self._open is None:  # it never began, or the session is closed
                return
            if not succeeded or not answer.tokens:
                self._settle()
                return
            conversation = self._joined(turn, answer)
            undo = now.undo if again else self._undoable(before)
            self._settled = Settled(conversation, rng_state(sampler.rng), undo, turn)

        pieces = generate(
            answer, self._context, sampler, drafting, prefill=prefill, finish=finish
        )  # fmt: skip
        generation = Generation(answer, pieces, self._hold)
        # weakly: to drop an answer is to end it
        self._making = weakref.ref(generation)
        return generation

    def _joined(self, turn: Turn, answer: Answer) -> Conversation:
        """The transcript with the answer, of which the state keeps what belongs to it."""
        kept = self._context.drop(len(answer.tokens), answer.kept)
        if turn.conversation is None:
            context = self._context
            if context.capacity is None and len(context.tokens) > 2 * prompts.SHOWN:
                context.forget(0, len(context.tokens) - prompts.SHOWN)
            return self._settled.conversation
        ends = self.model.tokenizer.eos
        said = tuple(token for token in answer.tokens[:kept] if token not in ends)
        calls = answer.result.tool_calls if answer.result else ()
        return turn.conversation.answered(Message("assistant", "".join(answer.text), said, calls))

    # -- going back ------------------------------------------------------------------------------

    def reset(self, system: str | None = None) -> None:
        """Forget everything but the system message, or put another one in its place ("": none);
        `undo` brings back what was said.
        """
        if system is not None:
            check_text(system)
            self._opening = Conversation((Message("system", system),) if system else ())
        with self._hold:
            now, before = self._at_rest(), self._snapshot()
            self._settled = replace(now, mark=before.context)
            self._context.clear()
            self._settled = Settled(self._opening, now.rng, self._undoable(before))

    def undo(self) -> None:
        """Take the last turn back, by copying the state from before it: nothing is run again.

        Raises StateError when no turn can be taken back.
        """
        with self._hold:
            undo = self._at_rest().undo
            if not undo:
                raise StateError("nothing to undo", remedy=f"{self._levels} turns are kept")
            self._go(undo[-1], undo[:-1])

    def snapshot(self) -> SessionSnapshot:
        """All of this session now, to come back to with `restore`."""
        with self._hold:
            self._at_rest()
            return self._snapshot()

    def restore(self, snapshot: SessionSnapshot, *, undoable: bool = False) -> None:
        """Go back to a snapshot of a session of the same model. Raises StateError otherwise.

        `undoable`: `undo` takes this back, as it does with a turn.
        """
        if not isinstance(snapshot, SessionSnapshot):
            raise StateError(
                f"is not a snapshot, but {type(snapshot).__name__}", field="snapshot",
                remedy="give what snapshot() returned; load() reads a file",
            )  # fmt: skip
        with self._hold:
            now = self._at_rest()
            self._context.state.check(snapshot.context.state)
            self._go(snapshot, self._undoable(self._snapshot()) if undoable else now.undo)

    def _go(self, to: SessionSnapshot, undo: tuple[SessionSnapshot, ...]) -> None:
        """Become what a snapshot of this model says."""
        self._settled = Settled(to.conversation, to.rng, undo, mark=to.context)
        self._settle()

    def _snapshot(self) -> SessionSnapshot:
        now = self._settled
        return SessionSnapshot(self._context.mark(), now.conversation, now.rng)

    def _undoable(self, before: SessionSnapshot) -> tuple[SessionSnapshot, ...]:
        """What `undo` goes back to, once something has been done that began at `before`."""
        return (*self._settled.undo, before)[-self._levels :]

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write state, transcript and random numbers to a file, whole or not at all.

        Raises StateError when it cannot be written.
        """
        with self._hold:
            now, context = self._at_rest(), self._context
            saved = SavedSession(now.conversation, context.consumed, now.rng)
            context.state.save(path, transcript.to_json(saved, self.model.path.name))

    def load(self, path: str | os.PathLike[str], *, replay: bool = False) -> int:
        """Resume a saved session as if it had never been left; `undo` takes that back.

        Returns how many tokens need not be run again. Raises StateError: damaged, or of another
        model, quantization, tokenizer or version; this session is then unchanged. `replay`: of a
        chat whose state cannot be used here the messages are still taken, and the next answer
        reads those that prompts are made of; the return is 0.
        """
        with self._hold:
            now, before = self._at_rest(), self._snapshot()
            self._settled = replace(now, mark=before.context)
            try:
                saved = transcript.load_into(self._context, path, self.model.tokenizer)
            except StateError as problem:
                replay = replay and self.model.template is not None
                conversation = transcript.read_conversation(path) if replay else None
                if conversation is None:
                    self._settle()
                    raise
                log.info("edge.session", "%s: read again, %s", path, problem.message)
                self._context.clear()
                saved = SavedSession(conversation, Consumed(), now.rng)
            self._settled = Settled(saved.conversation, saved.rng, self._undoable(before))
            log.info("edge.session", "resumed %s: %d tokens", path, self._context.position)
            return self._context.position

    # -- at rest ---------------------------------------------------------------------------------

    def _at_rest(self) -> Settled:
        """What holds. An answer that was cancelled and waits to be iterated ends here. Raises
        InputError while another one is being made, and when the session is closed.
        """
        if self._open is None:
            raise _closed()
        generation = self._making()
        if generation is not None and not generation.stopped():
            raise InputError(
                "an answer is being made", remedy="finish it, close() it, or cancel() first"
            )
        return self._settle()

    def _settle(self) -> Settled:
        """What holds, once what was interrupted half-way is taken back."""
        now = self._settled
        if now.mark is not None:
            self._context.restore(now.mark)
            now = self._settled = replace(now, mark=None)
        return now

    def _calm(self) -> Context:
        """The context, settled unless something is under way in it."""
        if self._settled.mark is not None and not self.busy:
            with suppress(EngineError), self._hold:
                self._settle()
        return self._context


def _log(answer: Answer) -> None:
    if (made := answer.result) is None:
        log.info("edge.answer", "failed after %d tokens", len(answer.tokens))
        return
    log.info(
        "edge.answer", "%s: %d tokens fed, %d reused, %d made in %.3f s",
        made.finish_reason, made.prompt_tokens, made.reused_tokens, len(made.tokens),
        made.timings.total_s,
    )  # fmt: skip


def _closed() -> InputError:
    return InputError("the session is closed", remedy="open another with model.session()")
