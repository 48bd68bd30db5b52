"""A conversation or a running text over one state, which is reused from turn to turn."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from edge import log
from edge.errors import InputError, StateError, TokenizerError
from edge.runtime import transcript
from edge.runtime.constrain.mask import open_mask
from edge.runtime.engine import DEFAULT_WINDOW
from edge.runtime.generate import Answer, Context, ContextMark, Generation, Logits, generate
from edge.runtime.result import FinishReason
from edge.runtime.sampling import (
    Sampler,
    Sampling,
    SamplingParams,
    check_number,
    collecting,
    make_params,
    new_rng,
    refuse,
    restore_rng,
    rng_state,
    unknown_names,
)
from edge.runtime.state import Hold
from edge.runtime.transcript import PromptReader
from edge.text.template import Message
from edge.text.tokenizer import check_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edge.runtime.constrain.tools import ToolUse
    from edge.runtime.model import Model
    from edge.runtime.speculate.decode import Drafting

MAX_PROMPT_TOKENS = 1 << 17
UNDO_LEVELS = 4


@dataclass(frozen=True)
class SessionSnapshot:
    """All of a session at one moment. Holds a copy of one state."""

    context: ContextMark
    messages: tuple[Message, ...]
    rng: Mapping[str, Any]


@dataclass
class Turn:
    """A turn, kept for `regenerate`.

    Attributes:
        tokens: of the prompt.
        messages: the transcript it answers, of a chat. tools: what that answer may call.
        read: where the prompt had been read and nothing of the answer, and the logits [V] there.
    """

    tokens: list[int]
    messages: list[Message] | None
    tools: ToolUse | None = None
    read: tuple[ContextMark, Logits] | None = None


class SessionOptions(TypedDict, total=False):
    """Keywords of `Model.session`.

    Attributes:
        system: the chat's first message.
        window: most tokens of a run that can be taken back; see `Engine.new_state`.
        capacity: tokens the KV caches hold; None is the trained context, at most 4096.
        seed: of random numbers that answers without a seed of their own draw from.
        max_prompt_tokens: most tokens of one prompt.
        undo_levels: how many turns `undo` can take back; each holds a copy of one state.
        draft: another model, best one of the same vocabulary, or "ngram": it proposes tokens for
            this one to verify.
        draft_tokens: how many it proposes in a row.
        draft_tree: or a tree of them, with so many children of every node at each depth; "ucb" is
            one of three, as Mamba Drafters chooses. Without either, what proves quickest.
        accept: "exact", or "top-3": lossy, a drafted token is accepted while it is among the
            target's three likeliest.
    """

    system: str | None
    window: int
    capacity: int | None
    seed: int | None
    max_prompt_tokens: int
    undo_levels: int
    draft: Model | Literal["ngram"] | None
    draft_tokens: int | None
    draft_tree: Sequence[int] | Literal["ucb"] | None
    accept: str


class Session:
    """One user of a model. Either a chat (`chat`) or a text that goes on (`generate`).

    The state always holds exactly the tokens of the transcript so far, so a turn runs only what is
    new. One thread uses a session at a time, a second one gets an EngineError; only `cancel` may
    come from anywhere.

    Attributes:
        model: what it runs on.
    """

    def __init__(self, model: Model, **options: Unpack[SessionOptions]) -> None:
        """Everything is allocated here.

        Raises InputError naming every unknown option and every value that is out of range;
        EngineError, StateError without memory.
        """
        self.model = model
        system, capacity = options.get("system"), options.get("capacity")
        window, accept = options.get("window", DEFAULT_WINDOW), options.get("accept", "exact")
        draft, tree = options.get("draft"), options.get("draft_tree")
        draft_tokens = options.get("draft_tokens")
        longest = options.get("max_prompt_tokens", MAX_PROMPT_TOKENS)
        levels = options.get("undo_levels", UNDO_LEVELS)
        self._drafting: Drafting | None = None

        faults = unknown_names(options, SessionOptions.__annotations__)
        with collecting(faults):
            check_text(system or "")
        with collecting(faults):
            self._rng = new_rng(SamplingParams(seed=options.get("seed")).seed)
        with collecting(faults):
            check_number("max_prompt_tokens", longest, 1, 1 << 31, whole=True)
        with collecting(faults):
            check_number("undo_levels", levels, 0, 1 << 16, whole=True)
        with collecting(faults):
            model.engine.memory_plan(window=window, capacity=capacity)  # refuses both sizes
        # speculation is imported with a drafter only
        if (draft, draft_tokens, tree, accept) != (None, None, None, "exact"):
            with collecting(faults):
                from edge.runtime.speculate.choose import drafting

                self._drafting = drafting(model, draft, draft_tokens, tree, capacity, accept)
        refuse(faults)

        self._reader = PromptReader(model.tokenizer, longest)
        self._opening = [] if system is None else [Message("system", system)]
        self._messages = list(self._opening)
        if self._drafting is not None:
            window = max(window, self._drafting.window)
        self._open: Context | None = Context(
            model.engine, model.engine.new_state(window=window, capacity=capacity)
        )
        self._undo: deque[SessionSnapshot] = deque(maxlen=max(1, levels))
        self._hold = Hold(
            "the session is in use by another thread, or by the answer being made",
            "use one session per thread",
        )
        self._answer: Answer | None = None
        self._last: Turn | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the answer being made and let go of the state's memory; `messages` stay.

        Raises EngineError while another thread uses the session.
        """
        self.cancel()
        with self._hold:
            self._open = self._answer = self._last = None
            self._undo.clear()

    @property
    def _context(self) -> Context:
        if self._open is None:
            raise _closed()
        return self._open

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
    def constant_bytes(self) -> int:
        """Of these, what does not depend on the context: all but the KV caches' rows."""
        state = self._context.state
        return state.nbytes - state.layout.cache_bytes

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
        return self._answer is not None

    @property
    def undo_levels(self) -> int:
        """How many turns `undo` can take back now."""
        return len(self._undo)

    # -- answers ---------------------------------------------------------------------------------

    def generate(
        self, prompt: str | Sequence[int] | None = None, **sampling: Unpack[Sampling]
    ) -> Generation:
        """Go on from `prompt`, text or token ids, after whatever this session holds.

        None, or nothing, goes on from where the last answer ended; in a new session it begins with
        the model's `bos`, where it has one. `sampling`: see `SamplingParams`; what is not given, or
        None, is as the model's defaults say. Nothing runs before the answer is iterated.

        Raises InputError: parameters, ids out of range, a prompt that is too long or, with nothing
        to go on from, empty; ContextFullError; InputError while another answer is unfinished.
        """
        with self._idle():
            if self._messages:
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
                    "empty, and there is nothing to go on from",
                    field="prompt",
                    remedy="give some text",
                )
            self._reader.check_length(len(feed))
            context.check_room(len(context.tokens) + len(feed))
            return self._begin(Turn(feed, None), sampling)

    def chat(
        self,
        text: str | Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Answer a user's message, or the last of a whole list of messages.

        A list replaces the transcript; what it has in common with it is not run again. The answer
        joins the transcript when it ends, however it ends, unless nothing was generated.

        `tools`: functions that the answer may call, as the OpenAI API declares them; `tool_choice`:
        "auto", "none", "required" or a name. The calls are `result.tool_calls`; a message with the
        role `tool` tells what came of one. Tools hold for one answer: give them again with the next
        message, or all is read again.

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
            self._reader.check_messages(messages)
            use = None
            if tools or tool_choice != "auto":
                from edge.runtime.constrain.tools import tool_use

                tokenizer = self.model.tokenizer
                use = tool_use(tools, tool_choice, parallel_tool_calls, template, tokenizer)
            wanted = template.encode(messages, tools=use.declared if use else ())
            self._reader.check_length(len(wanted))
            self._context.check_room(len(wanted))
            if not wanted:
                raise InputError("the conversation has no tokens", field="messages")
            return self._begin(Turn(wanted, messages, use), sampling)

    def regenerate(self, **sampling: Unpack[Sampling]) -> Generation:
        """Answer the last turn again, from the state in which its prompt had been read.

        The answer before is forgotten when this one leaves a trace. After `undo`, `restore` and
        `load` the prompt of a chat is read again. Raises StateError where there is no last turn.
        """
        with self._idle():
            last = self._last or self._last_said()
            if last is None:
                raise StateError("no answer to make again", remedy="say something first")
            return self._begin(last, sampling, again=True)

    def cancel(self) -> None:
        """End the answer that is being made, within one step or chunk; from any thread."""
        answer = self._answer
        if answer is not None:
            answer.cancelled.set()

    def _last_said(self) -> Turn | None:
        """The last turn of a chat that came back by `undo`, `restore` or `load`: its prompt is read
        again. None of a running text, of which nobody knows where the prompt ended.
        """
        template = self.model.template
        if template is None or not self._messages or self._messages[-1].role != "assistant":
            return None
        messages = self._messages[:-1]
        return Turn(template.encode(messages), messages)

    def _begin(self, turn: Turn, sampling: Mapping[str, Any], *, again: bool = False) -> Generation:
        """The answer to a turn; `again`: another one, which takes the place of the first."""
        tokenizer = self.model.tokenizer
        use = turn.tools
        given = use.sampling(sampling, self.model.defaults) if use else sampling
        params = make_params(self.model.defaults, given)
        for token in params.logit_bias:
            tokenizer.check_id(token)
        # random numbers are copied: those of an answer that leaves no trace are not used up
        continued = turn.messages is None
        mask = open_mask(tokenizer, params.constraint, continued=continued)
        sampler = Sampler(params, restore_rng(rng_state(self._rng)), mask)
        drafting = self._drafting
        if drafting is None and mask is not None:
            # speculation is imported where something may be drafted only
            from edge.runtime.speculate.grammar import GRAMMAR_ALONE as drafting
        answer = self._answer = Answer(params, continued=continued, tools=use)
        before: SessionSnapshot | None = None

        def prefill() -> Logits | None:
            nonlocal before
            before = self._snapshot()
            return self._read(turn, answer)

        def finish(succeeded: bool) -> None:
            if self._answer is answer:
                self._answer = None
            _log(answer)
            if before is None or self._open is None:  # it never began, or the session is closed
                return
            if not succeeded or not answer.tokens:
                self._restore(before)
                return
            if not again:
                self._undo.append(before)
            self._last, self._rng = turn, sampler.rng
            self._join(turn, answer)

        pieces = generate(
            answer, self._context, sampler, tokenizer, drafting,
            prefill=prefill, finish=finish,
        )  # fmt: skip
        return Generation(answer, pieces, self._hold)

    def _read(self, turn: Turn, answer: Answer) -> Logits | None:
        """Bring the state to the end of the turn's prompt; the logits [V] there."""
        context = self._context
        if turn.read is not None:
            mark, logits = turn.read
            context.restore(mark)
            answer.reused_tokens = len(context.tokens)
            return logits
        chat = turn.messages is not None
        answer.reused_tokens = context.align(turn.tokens) if chat else len(context.tokens)
        feed = turn.tokens[answer.reused_tokens :] if chat else turn.tokens
        held, answer.prompt_length = len(context.tokens), len(feed)

        def halted() -> FinishReason | None:
            answer.prompt_tokens = len(context.tokens) - held
            return answer.halted()

        read = context.feed(feed, halted)
        answer.prompt_tokens = len(context.tokens) - held  # fewer where it was halted
        if read is not None:
            turn.read = context.mark(), read.copy()
        return read

    def _join(self, turn: Turn, answer: Answer) -> None:
        """The answer joins state and transcript."""
        kept = self._drop_last(len(answer.tokens), answer.kept)
        if turn.messages is not None:
            ends = self.model.tokenizer.eos
            said = tuple(token for token in answer.tokens[:kept] if token not in ends)
            text = "".join(answer.text)
            calls = answer.result.tool_calls if answer.result else ()
            self._messages = [*turn.messages, Message("assistant", text, said, calls)]

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

    # -- going back ------------------------------------------------------------------------------

    def reset(self, system: str | None = None) -> None:
        """Forget everything but the system message, or put another one in its place ("": none);
        `undo` brings back what was said.
        """
        if system is not None:
            check_text(system)
            self._opening = [Message("system", system)] if system else []
        with self._idle():
            self._undo.append(self._snapshot())
            self._last = None
            self._context.clear()
            self._messages = list(self._opening)

    def undo(self) -> None:
        """Take the last turn back, by copying the state from before it: nothing is run again.

        Raises StateError when no turn can be taken back.
        """
        with self._idle():
            if not self._undo:
                raise StateError("nothing to undo", remedy=f"{self._undo.maxlen} turns are kept")
            self._restore(self._undo.pop())

    def snapshot(self) -> SessionSnapshot:
        """All of this session now, to come back to with `restore`."""
        with self._idle():
            return self._snapshot()

    def restore(self, snapshot: SessionSnapshot, *, undoable: bool = False) -> None:
        """Back to a snapshot of a session of the same model. Raises StateError otherwise.

        `undoable`: `undo` takes this back, as it does with a turn.
        """
        with self._idle():
            before = self._snapshot() if undoable else None
            self._restore(snapshot)
            if before is not None:
                self._undo.append(before)

    def _snapshot(self) -> SessionSnapshot:
        return SessionSnapshot(self._context.mark(), self.messages, rng_state(self._rng))

    def _restore(self, snapshot: SessionSnapshot) -> None:
        self._last = None
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
                self._messages, self._context.tokens, self._context.pending,
                rng_state(self._rng), self.model.path.name,
            )  # fmt: skip
            self._context.state.save(path, extra)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Resume a saved session as if it had never been left; `undo` takes that back.

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
            self._last = None
            self._context.tokens[:] = saved.tokens
            self._context.pending = saved.pending
            self._messages, self._rng = list(saved.messages), rng
            log.info("edge.session", "resumed %s: %d tokens", path, len(saved.tokens))
            return len(saved.tokens)

    @contextmanager
    def _idle(self) -> Iterator[None]:
        with self._hold:
            if self._open is None:
                raise _closed()
            if self._answer is not None:
                raise InputError(
                    "an answer is being made", remedy="finish it, or close() it, first"
                )
            yield


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
